"""The host's side of a tape: pinned and pageable memory of one rank, by peaks.

Known limitations: what the libraries themselves take is a constant measured on one machine (`BASE_BYTES`); tensors are
counted when they are made, whether or not their pages are touched.
"""

from collections import Counter
from dataclasses import dataclass

from dstune.estimator.tape import HOST_LOCKED, HOST_PAGEABLE, HOST_PINNED, Kind, Tape

BUILD_BASE_BYTES = 987_000_000
"""Resident memory of a process with torch, deepspeed and transformers before CUDA is used.

Source: `host_rss_after_build` less the float32 weights, recorded runs on an H200 (torch 2.11, deepspeed 0.19.8),
December 2026: 0.985 to 0.99 GB on GPT-2, Qwen2 0.5 B and TinyLlama."""
TRAIN_BASE_BYTES = 1_840_000_000
"""The same once CUDA's context and libraries are loaded.

Source: `host_rss_max` of the recorded runs whose training exceeds their build: GPT-2 at ZeRO 0 to 2."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Peaks of one process, in bytes."""

    pinned: int
    pageable: int
    """Tensors and the process itself, at the moment when it and pinned memory together were largest."""

    @property
    def total(self) -> int:
        """What one process needs."""
        return self.pinned + self.pageable


def host_memory(tape: Tape) -> HostMemory:
    """Follow host allocations along the tape.

    Pinned blocks come from torch's caching host allocator: sizes are rounded up to a power of two, and a freed block
    is kept for the next of its size. Source: torch 2.11 `aten/src/ATen/core/CachingHostAllocator.h`.
    """
    pinned, pageable, peak, best = 0, 0, -1, HostMemory(0, 0)
    cached: Counter[int] = Counter()
    live: dict[int, tuple[int, int]] = {}
    base = BUILD_BASE_BYTES
    for kind, block, size, stream, _label in tape.rows():
        if kind == Kind.ALLOC and stream == HOST_PAGEABLE:
            pageable += size
            live[block] = (stream, size)
        elif kind == Kind.ALLOC and stream == HOST_PINNED:
            rounded = power_of_two(size)
            live[block] = (stream, rounded)
            if cached[rounded]:
                cached[rounded] -= 1
            else:
                pinned += rounded
        elif kind == Kind.ALLOC and stream == HOST_LOCKED:
            pinned += size
            live[block] = (stream, size)
        elif kind == Kind.FREE and block in live:
            kept, held = live.pop(block)
            if kept == HOST_PAGEABLE:
                pageable -= held
            elif kept == HOST_LOCKED:
                pinned -= held
            else:
                cached[held] += 1
        elif kind == Kind.ALLOC and stream >= 0:
            base = TRAIN_BASE_BYTES
        if pinned + pageable + base > peak:
            peak = pinned + pageable + base
            best = HostMemory(pinned, pageable + base)
    return best


def power_of_two(size: int) -> int:
    """The next power of two, at least one byte."""
    return 1 << max(0, size - 1).bit_length()
