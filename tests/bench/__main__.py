"""Time everything a user waits for: `python -m tests.bench [--write] [NAME...]`.

Prints a table; `--write` puts it into `docs/explanation/speed.md` with the versions and the date. NAME picks lines.
"""

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dstune.units import GIB
from tests.bench.case import (
    Timing,
    cluster_of,
    default_table,
    one_row,
    time_command,
    time_import,
    time_largest,
    time_plans,
    time_replay,
)

PAGE = Path(__file__).parents[2] / "docs/explanation/speed.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
SEQ_LEN = 4096


def main(words: list[str]) -> int:
    """Time what is asked for."""
    wanted = [word for word in words if not word.startswith("--")]
    lines = ["| work | wall s | at most | first row s | CPU s | operations | us an op | peak GiB |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    sys.stdout.write("\n".join(lines) + "\n")
    for timing in _timings(wanted):
        lines.append(_line(timing))
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    if "--write" in words:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        block = "\n".join([_versions(), "", *lines])
        PAGE.write_text(f"{head}{BEGIN}\n{block}\n{END}{rest.partition(END)[2]}")
    return 0


def _timings(wanted: list[str]) -> Iterator[Timing]:
    eight, many, most = (cluster_of("h100", number) for number in (8, 64, 1024))
    llama = "llama-3-8b"
    imports = time_import()
    asked = ["estimate", "gpt2", "--gpu", "h100", "--gpus", "8", "--zero", "2"]
    cases: dict[str, Callable[[], Timing]] = {
        "import": lambda: imports,
        "help": partial(time_command, "`dstune --help`", ["--help"], 0.5),
        "gpt2": partial(time_plans, "GPT-2, ZeRO 2, 8 GPUs", "gpt2", eight, one_row(eight, 2, 1024), 2),
        "gpt2-slow": partial(
            time_plans,
            "the same through torch's fake dispatch",
            "gpt2",
            eight,
            one_row(eight, 2, 1024),
            None,
            fast=False,
        ),
        "tinyllama": partial(
            time_plans, "TinyLlama 1.1B, ZeRO 3, 8 GPUs", "tinyllama-1.1b", eight, one_row(eight, 3, 2048), None
        ),
        "llama": partial(time_plans, "Llama 3 8B, ZeRO 3, 64 GPUs", llama, many, one_row(many, 3, SEQ_LEN), 8),
        "llama-slow": partial(
            time_plans,
            "the same through torch's fake dispatch",
            llama,
            many,
            one_row(many, 3, SEQ_LEN),
            None,
            fast=False,
        ),
        "table": partial(
            time_plans, "the default table (24), Llama 3 8B, 64 GPUs", llama, many, default_table(many, SEQ_LEN), 120
        ),
        "largest": partial(
            time_largest,
            "largest micro-batch of one row",
            llama,
            many,
            one_row(many, 3, SEQ_LEN)[0],
            20,
            imports.wall_s,
        ),
        "405b": partial(
            time_plans, "Llama 3.1 405B, ZeRO 3, 1024 GPUs", "llama-3.1-405b", most, one_row(most, 3, SEQ_LEN), 60
        ),
        "replay": time_replay,
        "again": partial(time_command, "a table asked before (6 rows)", asked, 1),
    }
    for name, case in cases.items():
        if not wanted or name in wanted:
            yield case()


def _line(timing: Timing) -> str:
    def number(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    per_op = timing.cpu_s / timing.num_ops * 1e6 if timing.cpu_s and timing.num_ops else None
    cells = [
        timing.name,
        number(timing.wall_s),
        number(timing.limit_s, 1),
        number(timing.first_s),
        number(timing.cpu_s),
        "" if timing.num_ops is None else f"{timing.num_ops:,}",
        number(per_op, 0),
        number(timing.peak_rss_bytes / GIB if timing.peak_rss_bytes else None),
    ]
    return f"| {' | '.join(cells)} |"


def _versions() -> str:
    names = ("torch", "deepspeed", "transformers")
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return (
        f"{libraries}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, "
        f"{time.strftime('%Y-%m-%d')}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
