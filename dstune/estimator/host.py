"""The host's side of a tape: pinned and pageable memory of one rank, by peaks.

Known limitations: what the libraries themselves take is a constant measured on one machine (`BASE_BYTES`); tensors are
counted when they are made, whether or not their pages are touched.
"""

from collections import Counter
from dataclasses import dataclass, replace

from dstune.estimator.tape import HOST_LOCKED, HOST_PAGEABLE, HOST_PINNED, Kind, Tape

BUILD_BASE_BYTES = 987_000_000
"""Resident memory of a process with torch, deepspeed and transformers before CUDA is used.

Source: `host_rss_after_build` less the float32 weights, recorded runs on an H200 (torch 2.11, deepspeed 0.19.8),
December 2026: 0.985 to 0.99 GB on GPT-2, Qwen2 0.5 B and TinyLlama."""
TRAIN_BASE_BYTES = 1_840_000_000
"""The same once CUDA's context and libraries are loaded.

Source: `host_rss_max` of the recorded runs whose training exceeds their build: GPT-2 at ZeRO 0 to 2."""


PROCESS = "process"
"""Owner of what no tensor holds: interpreter, libraries, CUDA's context."""
SWAP_BUFFERS = "swap buffers"
"""Owner of what DeepSpeed page-locks for NVMe."""
OWNERS = {
    "built": "model before it is partitioned",
    "initialized": "master weights, gradient and parameter buffers",
    "fwd": "activations",
    "bwd": "gradients",
    "step": "optimizer states",
}
"""Phase in which a tensor is made -> whose it is. DeepSpeed makes its buffers while it sets up, Adam its states in the
first step."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Peaks of one process, in bytes.

    Attributes:
        pinned: The most that was pinned or page-locked at any time.
        pageable: Tensors and the process itself, at the moment when most was resident.
        total: What was resident then.
        by_owner: Whose it was.
    """

    pinned: int
    pageable: int
    total: int
    by_owner: dict[str, int]


def host_memory(tape: Tape) -> HostMemory:
    """Follow host allocations along the tape.

    Pinned blocks come from torch's caching host allocator: sizes are rounded up to a power of two, and a freed block
    is kept for the next of its size. Source: torch 2.11 `aten/src/ATen/core/CachingHostAllocator.h`.
    """
    owners = _owners(tape)
    num_built = owners[0][0] if owners else 0
    books = _Books(owners)
    for position, (kind, block, size, stream, _label) in enumerate(tape.rows()):
        if kind == Kind.ALLOC and stream >= 0:
            books.base = TRAIN_BASE_BYTES
        elif kind == Kind.ALLOC:
            books.take(block, size, stream, position)
        elif kind == Kind.FREE:
            books.give(block)
        if position >= num_built:  # weights that are tied away while the model is built are never touched
            books.look()
    return books.best


class _Books:
    """Who holds what on the host, now and at the worst moment."""

    def __init__(self, owners: list[tuple[int, str]]) -> None:
        self.base = BUILD_BASE_BYTES
        self.best = HostMemory(0, 0, 0, {})
        self._owners = owners
        self._pinned = self._pageable = self._peak_pinned = 0
        self._held: Counter[str] = Counter()
        self._cached: Counter[int] = Counter()
        self._live: dict[int, tuple[int, int, str]] = {}

    def take(self, block: int, size: int, kind: int, position: int) -> None:
        owner = SWAP_BUFFERS if kind == HOST_LOCKED else self._owner(position)
        if kind == HOST_PINNED:
            size = power_of_two(size)
        if kind == HOST_PINNED and self._cached[size]:
            self._cached[size] -= 1
        elif kind == HOST_PAGEABLE:
            self._pageable += size
        else:
            self._pinned += size
        self._held[owner] += size
        self._live[block] = (kind, size, owner)
        self._peak_pinned = max(self._peak_pinned, self._pinned)

    def look(self) -> None:
        total = self._pinned + self._pageable + self.base
        if total > self.best.total:
            held = {name: size for name, size in self._held.items() if size > 0}
            pageable = self._pageable + self.base
            self.best = HostMemory(self._peak_pinned, pageable, total, {**held, PROCESS: self.base})
        elif self._peak_pinned > self.best.pinned:
            self.best = replace(self.best, pinned=self._peak_pinned)

    def give(self, block: int) -> None:
        if block not in self._live:
            return
        kind, size, owner = self._live.pop(block)
        if kind == HOST_PINNED:
            self._cached[size] += 1  # stays pinned, for its owner's next block
        elif kind == HOST_PAGEABLE:
            self._pageable -= size
        else:
            self._pinned -= size
        self._held[owner] -= size

    def _owner(self, position: int) -> str:
        while len(self._owners) > 1 and position > self._owners[0][0]:
            self._owners.pop(0)
        return self._owners[0][1] if self._owners else OWNERS["built"]


def _owners(tape: Tape) -> list[tuple[int, str]]:
    """Where each phase ends, and who owns what is made in it."""
    found = []
    for position, (kind, _block, _size, _stream, label) in enumerate(tape.rows()):
        if kind == Kind.MARK:
            name = tape.labels[label].rstrip("0123456789.")
            found.append((position, OWNERS.get(name, OWNERS["step"])))
    return found


def power_of_two(size: int) -> int:
    """The next power of two, at least one byte."""
    return 1 << max(0, size - 1).bit_length()
