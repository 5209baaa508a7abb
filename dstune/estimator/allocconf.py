"""`PYTORCH_ALLOC_CONF`, read as torch reads it: the keys that change what is reserved.

Source: torch 2.13 `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dstune.errors import UsageError
from dstune.units import MIB

NUM_INTERVALS = 16
"""Powers of two from 1 MiB on that have divisions of their own (`kRoundUpPowerOfTwoIntervals`)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment shared by middling requests (`kLargeBuffer`)."""
MIN_LARGE_SEGMENT_MB = 11
"""The least that torch takes for `large_segment_size_mb`: more than `kMinLargeAlloc`."""


@dataclass(frozen=True, slots=True)
class AllocConf:
    """What the allocator is told.

    Attributes:
        expandable: Segments grow (`expandable_segments`).
        large_segment_bytes: Segment shared by middling requests (`large_segment_size_mb`).
        max_split_bytes: Blocks from this size on are never split (`max_split_size_mb`), or None.
        max_rounding_bytes: How much larger such a block may be than a request (`max_non_split_rounding_mb`).
        divisions: Steps between powers of two that sizes are rounded up to, for each power from 1 MiB on
            (`roundup_power2_divisions`); empty for none.
        gc_fraction: Part of the allowed memory from which on cached segments are given back, or 0
            (`garbage_collection_threshold`). torch heeds it only in a process with a fraction set.
        memory_fraction: Part of the GPU that may be reserved (`per_process_memory_fraction`), or None.
    """

    expandable: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_split_bytes: int | None = None
    max_rounding_bytes: int = LARGE_SEGMENT_BYTES
    divisions: tuple[int, ...] = ()
    gc_fraction: float = 0.0
    memory_fraction: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> "AllocConf":
        """Read `key:value,key:value`.

        Raises:
            UsageError: A key that torch does not know, a value that it refuses, or another backend.
        """
        conf = cls()
        for key, value in _pairs(text or ""):
            read = _KEYS.get(key)
            if read is not None:
                conf = replace(conf, **_checked(read, key, value))
            elif key == "backend" and value != "native":
                raise UsageError(f"allocator backend `{value}` is not modelled", hint="leave `backend` out")
            elif key not in NO_EFFECT and key != "backend":
                raise UsageError(f"PYTORCH_ALLOC_CONF has no key `{key}`", hint=f"torch knows {', '.join(_KEYS)}")
        least = conf.large_segment_bytes
        if conf.max_split_bytes is not None and conf.max_split_bytes < least:
            raise UsageError("max_split_size_mb is too small", hint=f"torch takes {least // MIB} and more")
        return conf

    def division(self, size: int) -> int:
        """Steps between powers of two for a request of this many bytes, 0 for none."""
        if not self.divisions:
            return 0
        return self.divisions[min(max(size.bit_length() - MIB.bit_length(), 0), NUM_INTERVALS - 1)]


NO_EFFECT = frozenset(
    {
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
"""Keys that do not change reserved GPU memory."""


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at commas outside brackets, then at the first colon; white space does not count."""
    items = re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))
    return [(key, value) for key, _, value in (item.partition(":") for item in items if item)]


def _checked(read: Callable[[str], dict[str, Any]], key: str, value: str) -> dict[str, Any]:
    try:
        return read(value)
    except (ValueError, KeyError) as error:
        raise UsageError(f"`{value}` is no value of {key}", hint="see PYTORCH_ALLOC_CONF in torch's notes") from error


def _large_segment(value: str) -> dict[str, Any]:
    if int(value) < MIN_LARGE_SEGMENT_MB:
        raise ValueError(value)
    return {"large_segment_bytes": int(value) * MIB}


def _gc(value: str) -> dict[str, Any]:
    if not 0 < float(value) < 1:
        raise ValueError(value)
    return {"gc_fraction": float(value)}


def _divisions(value: str) -> dict[str, Any]:
    """`8`, or a list such as `[256:1,512:2,>:4]` with sizes in MiB; what lies below the first size is as it."""
    if not value.startswith("["):
        return {"divisions": (_power_of_two(value),) * NUM_INTERVALS}
    steps = [0] * NUM_INTERVALS
    last = -1
    for item in value.strip("[]").split(","):
        size, _, number = item.partition(":")
        count = 0 if number == "0" else _power_of_two(number)
        if size == ">":
            steps[max(last, 0) :] = [count] * (NUM_INTERVALS - max(last, 0))
            continue
        index = min(_power_of_two(size).bit_length() - 1, NUM_INTERVALS - 1)
        if last < 0:
            steps[:index] = [count] * index
        steps[index] = count
        last = index
    return {"divisions": tuple(steps)}


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(text)
    return number


_KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "expandable_segments": lambda value: {"expandable": {"True": True, "False": False}[value]},
    "large_segment_size_mb": _large_segment,
    "max_split_size_mb": lambda value: {"max_split_bytes": int(value) * MIB},
    "max_non_split_rounding_mb": lambda value: {"max_rounding_bytes": int(value) * MIB},
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _gc,
    "per_process_memory_fraction": lambda value: {"memory_fraction": float(value)},
}
"""Key -> what it sets."""
