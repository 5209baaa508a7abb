"""A model of torch's CUDA caching allocator (native backend): sizes, pools, segments, capacity.

Knows how `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11) places blocks, and nothing of tensors or training. Fed a
recorded list of a real GPU's events it gives the recorded amount of reserved memory after every event.

Known limitations: `max_split_size_mb`, `roundup_power2_divisions` and `garbage_collection_threshold` are not modelled;
the driver's choice of addresses, which breaks ties between equal blocks, is only approximated (given the recorded
addresses, every event of every recorded list is met, the block's address included); a block used by several streams is
freed at once.
"""

import bisect
from dataclasses import dataclass

from dstune.units import MIB

MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to this (`kMinBlockSize`)."""
SMALL_BYTES = MIB
"""Requests up to this come from small pools (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment of a small pool (`kSmallBuffer`)."""
MIN_LARGE_BYTES = 10 * MIB
"""Below this a large request gets a `LARGE_SEGMENT_BYTES` segment (`kMinLargeAlloc`)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment shared by middling requests (`kLargeBuffer`)."""
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


def segment_size(size: int) -> int:
    """The size of the segment that a rounded request opens when no free block is large enough."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
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
        addresses: Where segments lie.

    Attributes:
        allocated: Bytes in blocks in use now; `peak_allocated` since the last `reset_peaks`.
        reserved: Bytes in segments now; `peak_reserved` since the last `reset_peaks`.
        num_retries: How often cached segments had to be given back to make room.
    """

    def __init__(self, capacity_bytes: int | None = None, addresses: "AddressSpace | None" = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.num_retries = 0
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._addresses = addresses or AddressSpace()

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Take a block.

        Raises:
            OutOfMemoryError: As the real one would.
        """
        size = round_size(size_bytes)
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
        self._insert_merged(block, self._pools[block.small, block.stream])

    def empty_cache(self) -> None:
        """Give segments that are wholly free back to the driver."""
        for pool in self._pools.values():
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            if whole:
                self.reserved -= sum(entry[0] for entry in whole)
                pool[:] = [entry for entry in pool if not (entry[2].before is None and entry[2].after is None)]

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is in use now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _take(self, pool: Pool, size: int, *, small: bool, stream: int) -> Block:
        """The best free block, removed from its pool, or a fresh segment."""
        index = bisect.bisect_left(pool, (size, -1))
        if index < len(pool):
            return pool.pop(index)[2]
        segment = segment_size(size)
        self._make_room(segment)
        block = Block(self._addresses.place(segment), segment, small, stream)
        self._grow(segment)
        return block

    def _make_room(self, num_bytes: int) -> None:
        """Hold the capacity: cached segments are given back once before the request fails."""
        if self.capacity_bytes is None or self.reserved + num_bytes <= self.capacity_bytes:
            return
        self.num_retries += 1
        self.empty_cache()
        if self.reserved + num_bytes > self.capacity_bytes:
            raise OutOfMemoryError(num_bytes, self.capacity_bytes - self.reserved)

    def _grow(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        return rest >= MIN_BLOCK_BYTES if block.small else rest > SMALL_BYTES

    @staticmethod
    def _split(block: Block, size: int, pool: Pool) -> Block:
        """Cut a block; the rest goes to the pool."""
        rest = Block(block.address + size, block.size - size, block.small, block.stream)
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
            absorb(before, block)
            block = before
        after = block.after
        if after is not None and after.free and after.mapped:
            take_out(pool, after)
            absorb(block, after)
        bisect.insort(pool, (block.size, block.address, block))
        return block


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
