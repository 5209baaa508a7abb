"""A model of torch's CUDA caching allocator (native backend): sizes, pools, segments, capacity.

Knows how `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11) places blocks, and nothing of tensors or training. Fed a
recorded list of a real GPU's events it gives the recorded amount of reserved memory after every event.

Known limitations: the driver's choice of addresses, which breaks ties between equal blocks, is only approximated (given
the recorded addresses, every event of every recorded list is met, the block's address included); a block used by
several streams is freed at once.
"""

import bisect
import sys
from dataclasses import dataclass

from dstune.estimator.allocconf import AllocConf
from dstune.units import MIB

MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to this (`kMinBlockSize`)."""
SMALL_BYTES = MIB
"""Requests up to this come from small pools (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment of a small pool (`kSmallBuffer`)."""
MIN_LARGE_BYTES = 10 * MIB
"""Below this a large request gets a segment of `AllocConf.large_segment_bytes` (`kMinLargeAlloc`)."""
ROUND_LARGE_BYTES = 2 * MIB
"""Segments of big requests are rounded up to this (`kRoundLarge`)."""
CHUNK_BYTES = 32 * MIB
"""What CUDA's driver takes of the address space at a time: seen in recorded addresses (H200, driver 580)."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, free or in use; neighbours are those of the same segment."""

    address: int
    size: int
    small: bool
    stream: int
    free: bool = True
    mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None
    freed_at: int = 0


Pool = list[tuple[int, int, Block]]
"""Free blocks as (size, address, block), sorted: the best fit comes first."""


class OutOfMemoryError(Exception):
    """The capacity does not hold another segment, even with all cached ones given back.

    Attributes:
        segment_bytes: What the driver was asked for: the size that torch's message names.
        free_bytes: What the capacity had left.
    """

    def __init__(self, segment_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{segment_bytes} bytes do not fit into {free_bytes}")
        self.segment_bytes = segment_bytes
        self.free_bytes = free_bytes


def round_size(size: int) -> int:
    """The size of the block that a request of this many bytes gets."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def round_size_in_divisions(size: int, divisions: int) -> int:
    """The size of that block where steps between powers of two are set (`roundup_power2_next_division`)."""
    if divisions <= 1 or size <= MIN_BLOCK_BYTES * divisions:
        return round_size(size)
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return -(-size // step) * step


def segment_size(size: int, large_segment_bytes: int) -> int:
    """The size of the segment that a rounded request opens when no free block is large enough."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class AddressSpace:
    """Where segments lie. Addresses matter only because they order free blocks of equal size.

    The driver takes address space from the top down in chunks, and fills what is left of a chunk upwards.
    """

    def __init__(self) -> None:
        self._lowest = self._next = self._end = 1 << 60

    def place(self, size: int) -> int:
        """The address of a new segment."""
        if self._next + size > self._end:
            chunk = -(-size // CHUNK_BYTES) * CHUNK_BYTES
            self._lowest -= chunk
            self._next, self._end = self._lowest, self._lowest + chunk
        address = self._next
        self._next += size
        return address


class CachingAllocator:
    """The allocator of one GPU for one process.

    Args:
        capacity_bytes: The most that may be reserved, or None for no bound.
        conf: `PYTORCH_ALLOC_CONF`.
        addresses: Where segments lie.
        gc_bytes: Reserved memory from which on old cached segments are given back, or None.

    Attributes:
        allocated: Bytes in blocks in use now; `peak_allocated` since the last `reset_peaks`.
        reserved: Bytes in segments now; `peak_reserved` since the last `reset_peaks`.
        num_retries: How often cached segments had to be given back to make room.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        conf: AllocConf | None = None,
        addresses: "AddressSpace | None" = None,
        gc_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.num_retries = 0
        self._conf = conf = conf or AllocConf()
        self._large_segment_bytes = conf.large_segment_bytes
        self._max_split_bytes = conf.max_split_bytes or sys.maxsize
        self._has_divisions = bool(conf.divisions)
        self._gc_bytes = gc_bytes
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._addresses = addresses or AddressSpace()
        self._num_requests = {True: 0, False: 0}

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Take a block.

        Raises:
            OutOfMemoryError: As the real one would.
        """
        if self._has_divisions:
            size = round_size_in_divisions(size_bytes, self._conf.division(size_bytes))
        else:
            size = max(MIN_BLOCK_BYTES, -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        small = size <= SMALL_BYTES
        pool = self._pools.get((small, stream))
        if pool is None:
            pool = self._pools[small, stream] = []
        block = self._take(pool, size, small=small, stream=stream)
        if self._should_split(block, size):
            self._split(block, size, pool)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        self.allocated -= block.size
        block.free = True
        if self._gc_bytes is not None:
            block.freed_at = self._num_requests[block.small]
        self._insert_merged(block, self._pools[block.small, block.stream])

    def empty_cache(self) -> None:
        """Give segments that are wholly free back to the driver."""
        for pool in self._pools.values():
            self._release(pool, [entry for entry in pool if _is_whole(entry[2])])

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is in use now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _take(self, pool: Pool, size: int, *, small: bool, stream: int) -> Block:
        """The best free block, removed from its pool, or a fresh segment."""
        if self._gc_bytes is not None:
            self._num_requests[small] += 1
        index = bisect.bisect_left(pool, (size, -1))
        if index < len(pool) and self._may_take(pool[index][0], size):
            return pool.pop(index)[2]
        segment = segment_size(size, self._large_segment_bytes)
        if self._gc_bytes is not None and self.reserved > self._gc_bytes:
            self._collect_garbage(self.reserved - self._gc_bytes)
        self._make_room(segment, pool, size)
        block = Block(self._addresses.place(segment), segment, small, stream)
        self._grow(segment)
        return block

    def _may_take(self, found: int, size: int) -> bool:
        """Whether a free block is not too good for a request: unsplittable ones are for requests of their kind."""
        if size < self._max_split_bytes:
            return found < self._max_split_bytes
        return found < size + self._conf.max_rounding_bytes

    def _make_room(self, num_bytes: int, pool: Pool, size: int) -> None:
        """Hold the capacity: cached segments are given back before the request fails."""
        if self.capacity_bytes is None or self.reserved + num_bytes <= self.capacity_bytes:
            return
        splits_at_most = self._conf.max_split_bytes is not None
        if splits_at_most and self._release_oversized(pool, size) and self.reserved + num_bytes <= self.capacity_bytes:
            return
        self.num_retries += 1
        self.empty_cache()
        if self.reserved + num_bytes > self.capacity_bytes:
            raise OutOfMemoryError(num_bytes, self.capacity_bytes - self.reserved)

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Give back unsplittable blocks that make up for a request (`release_available_cached_blocks`)."""
        wanted = max(size, self._max_split_bytes)
        index = bisect.bisect_left(pool, (wanted, -1))
        if index < len(pool):
            self._release(pool, [pool[index]])
            return True
        released = 0
        while pool and released < wanted and pool[-1][0] >= self._max_split_bytes:
            released += pool[-1][0]
            self._release(pool, [pool[-1]])
        return released >= wanted

    def _collect_garbage(self, wanted: int) -> None:
        """Give back segments that lay unused for longest (`garbage_collect_cached_blocks`)."""
        now, released = self._num_requests[False], 0
        found = [(key, entry) for key, pool in self._pools.items() if not key[0] for entry in pool]
        found = sorted((item for item in found if _is_whole(item[1][2])), key=lambda item: (item[0][1], item[1][:2]))
        while released < wanted and found:
            threshold = sum(now - entry[2].freed_at for _, entry in found) / len(found)
            old = [item for item in found if now - item[1][2].freed_at >= threshold]
            if not old:
                return
            for key, entry in old:
                released += entry[0]
                self._release(self._pools[key], [entry])
                found.remove((key, entry))

    def _release(self, pool: Pool, entries: Pool) -> None:
        """Give whole segments back to the driver."""
        if entries:
            self.reserved -= sum(entry[0] for entry in entries)
            gone = {entry[1] for entry in entries}
            pool[:] = [entry for entry in pool if entry[1] not in gone]

    def _grow(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.small:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_BYTES and size < self._max_split_bytes

    @staticmethod
    def _split(block: Block, size: int, pool: Pool) -> Block:
        """Cut a block; the rest goes to the pool."""
        rest = Block(block.address + size, block.size - size, block.small, block.stream, freed_at=block.freed_at)
        link_after(block, rest)
        block.size = size
        bisect.insort(pool, (rest.size, rest.address, rest))
        return rest

    @staticmethod
    def _insert_merged(block: Block, pool: Pool) -> Block:
        """Put a free block into its pool, joined with free neighbours."""
        before = block.before
        if before is not None and before.free and before.mapped:
            take_out(pool, before)
            before.freed_at = block.freed_at
            absorb(before, block)
            block = before
        after = block.after
        if after is not None and after.free and after.mapped:
            take_out(pool, after)
            absorb(block, after)
        bisect.insort(pool, (block.size, block.address, block))
        return block


def _is_whole(block: Block) -> bool:
    """Whether a block is its whole segment."""
    return block.before is None and block.after is None


def take_out(pool: Pool, block: Block) -> None:
    """Take a block out of its pool; it is found by size and address."""
    del pool[bisect.bisect_left(pool, (block.size, block.address))]


def absorb(block: Block, after: Block) -> None:
    """Join a block with the one after it."""
    block.size += after.size
    block.after = after.after
    if after.after is not None:
        after.after.before = block


def link_after(block: Block, new: Block) -> None:
    """Make a block the next neighbour of another."""
    new.before, new.after = block, block.after
    if block.after is not None:
        block.after.before = new
    block.after = new
