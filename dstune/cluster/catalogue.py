"""Known GPUs, read from `devices.toml`, and the word after `--gpu`."""

import difflib
import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from dstune.cluster import Gpu
from dstune.errors import UsageError
from dstune.units import GIB, is_size, parse_bytes

USABLE_SHARE = 0.975
"""Of a nominal size; see the head of `devices.toml`."""
PLAIN_CAPABILITY = (8, 0)
PLAIN_MULTIPROCESSORS = 108
"""What a GPU that is only a size is taken for: an A100's kernels."""


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("dstune.cluster").joinpath("devices.toml").read_text(encoding="utf-8"))


@cache
def _aliases() -> dict[str, str]:
    return {alias: name for name, row in _table().items() for alias in row.get("aliases", ())}


@cache
def catalogue() -> dict[str, Gpu]:
    """All known GPUs by name."""
    return {
        name: Gpu(
            name=name,
            capacity_bytes=row.get("usable_bytes") or int(row["nominal_gib"] * GIB * USABLE_SHARE),
            compute_capability=tuple(row["capability"]),
            num_multiprocessors=row["multiprocessors"],
            source=row["source"],
        )
        for name, row in _table().items()
    }


def find_gpu(text: str) -> Gpu:
    """A GPU by catalogue name or by size (`24GiB`).

    Raises:
        UsageError: Neither; the nearest name is given.
    """
    if is_size(text):
        return Gpu(
            name=text,
            capacity_bytes=parse_bytes(text, "GPU memory"),
            compute_capability=PLAIN_CAPABILITY,
            num_multiprocessors=PLAIN_MULTIPROCESSORS,
            source="given as a size; kernels are an A100's",
        )
    known = catalogue()
    name = _normal(text)
    name = _aliases().get(name, name)
    if name in known:
        return known[name]
    begins = [other for other in known if other.startswith(f"{name}-")]
    if len(begins) == 1:
        return known[begins[0]]
    near = begins or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(f'`{other}`' for other in near)}?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"`{text}` is no known GPU", hint=f"{hint} A size such as 24GiB works too")


def _normal(text: str) -> str:
    """`NVIDIA A100 80GB` and `A100-SXM4-80GB` are both `a100-80gb`."""
    words = re.split(r"[\s_-]+", text.strip().lower())
    dropped = {"nvidia", "geforce", "tesla", "quadro", "sxm", "sxm2", "sxm4", "sxm5", "hbm3", "hbm3e", "hbm2e"}
    return "-".join(word for word in words if word not in dropped)
