"""The same allocator with `expandable_segments:True`: one growing stretch of addresses for each pool and stream.

Memory is mapped page by page at the end of what is mapped, and unmapped when it is wholly free; a block may be split
down to 512 bytes. Source: torch 2.11 `c10/cuda/CUDACachingAllocator.cpp` (`try_allocate_expandable_block`,
`map_block`, `unmap_block`, and the expandable part of `get_free_block`).
"""

import bisect

from dstune.estimator.allocator import (
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    AddressSpace,
    Block,
    CachingAllocator,
    Pool,
    absorb,
    link_after,
    segment_size,
    take_out,
)
from dstune.estimator.allocconf import AllocConf

ARENA_BYTES = 1 << 46
"""Address space of one stretch: more than any GPU has."""


class ExpandableAllocator(CachingAllocator):
    """Reserved memory is what is mapped."""

    def __init__(
        self,
        capacity_bytes: int | None = None,
        conf: AllocConf | None = None,
        addresses: AddressSpace | None = None,
        gc_bytes: int | None = None,
    ) -> None:
        super().__init__(capacity_bytes, conf, addresses, gc_bytes)
        self._unmapped: dict[tuple[bool, int], list[Block]] = {}

    def empty_cache(self) -> None:
        """Unmap whole pages of free blocks."""
        for pool in self._pools.values():
            for _, _, block in tuple(pool):
                self._unmap(block, pool)

    def _take(self, pool: Pool, size: int, *, small: bool, stream: int) -> Block:
        index = bisect.bisect_left(pool, (size, -1))
        if index < len(pool):
            while index + 1 < len(pool) and _can_grow_to(pool[index + 1][2]) < _can_grow_to(pool[index][2]):
                index += 1
            return pool.pop(index)[2]
        segment = segment_size(size, self._large_segment_bytes)
        self._make_room(segment, pool, size)  # torch compares a whole segment, though it may map less
        block = self._expand(pool, size, small=small, stream=stream)
        take_out(pool, block)
        return block

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Torch leaves expandable blocks alone here."""
        del pool, size
        return False

    def _collect_garbage(self, wanted: int) -> None:
        """And here."""

    def _should_split(self, block: Block, size: int) -> bool:
        return block.size - size >= MIN_BLOCK_BYTES

    def _page(self, *, small: bool) -> int:
        return SMALL_SEGMENT_BYTES if small else self._large_segment_bytes

    def _expand(self, pool: Pool, size: int, *, small: bool, stream: int) -> Block:
        """A free mapped block of at least this size, grown at the end of a stretch; it is in the pool."""
        block = self._candidate(size, small=small, stream=stream)
        if not block.mapped:
            block = self._map(block, min(block.size, size), pool)
        while block.size < size:
            after = block.after
            assert after is not None
            block = self._map(after, min(size - block.size, after.size), pool)
        return block

    def _candidate(self, size: int, *, small: bool, stream: int) -> Block:
        """Where free addresses suffice: an unmapped block, or the free mapped one right before it."""
        stretch = self._unmapped.get((small, stream))
        if stretch is None:
            page = self._page(small=small)
            base = -(-len(self._unmapped) * ARENA_BYTES // page) * page
            first = Block(base, ARENA_BYTES // page * page - page, small, stream, mapped=False)
            stretch = self._unmapped[small, stream] = [first]
        for unmapped in stretch:
            before = unmapped.before
            start = before if before is not None and before.free and before.mapped else unmapped
            if _free_from(start, size):
                return start
        msg = "the last unmapped block of a stretch is larger than any request"
        raise AssertionError(msg)

    def _map(self, block: Block, size: int, pool: Pool) -> Block:
        """Back addresses by memory, whole pages at a time; the block that results is free and in the pool."""
        page = self._page(small=block.small)
        mapped = min(-(-size // page) * page, block.size)
        stretch = self._unmapped[block.small, block.stream]
        stretch.remove(block)
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, block.small, block.stream, mapped=False)
            link_after(block, rest)
            block.size = mapped
            bisect.insort(stretch, rest, key=lambda one: one.address)
        block.mapped = True
        self._grow(mapped)
        return self._insert_merged(block, pool)

    def _unmap(self, block: Block, pool: Pool) -> None:
        page = self._page(small=block.small)
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        take_out(pool, block)
        if block.address + block.size > end:
            tail = Block(end, block.address + block.size - end, block.small, block.stream)
            link_after(block, tail)
            block.size -= tail.size
            bisect.insort(pool, (tail.size, tail.address, tail))
        if start > block.address:
            middle = Block(start, block.address + block.size - start, block.small, block.stream)
            link_after(block, middle)
            block.size -= middle.size
            bisect.insort(pool, (block.size, block.address, block))
            block = middle
        block.mapped = False
        self.reserved -= block.size
        self._join_unmapped(block)

    def _join_unmapped(self, block: Block) -> None:
        stretch = self._unmapped[block.small, block.stream]
        after = block.after
        if after is not None and not after.mapped:
            stretch.remove(after)
            absorb(block, after)
        before = block.before
        if before is not None and not before.mapped:
            absorb(before, block)
        else:
            bisect.insort(stretch, block, key=lambda one: one.address)


def _can_grow_to(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _free_from(block: Block | None, size: int) -> bool:
    """Whether free addresses from a block on suffice."""
    total = 0
    while total < size and block is not None and block.free:
        total += block.size
        block = block.after
    return total >= size


def make_allocator(
    conf: AllocConf,
    capacity_bytes: int | None = None,
    *,
    is_fraction: bool = False,
    addresses: AddressSpace | None = None,
) -> CachingAllocator:
    """The allocator that a process with this setting has.

    Args:
        conf: Its `PYTORCH_ALLOC_CONF`.
        capacity_bytes: The most that may be reserved, or None for no bound.
        is_fraction: Whether the process was given this capacity as a fraction of the GPU; only then torch collects
            garbage.
        addresses: Where segments lie.
    """
    collects = is_fraction and conf.gc_fraction > 0 and capacity_bytes is not None
    gc_bytes = int(conf.gc_fraction * (capacity_bytes or 0)) if collects else None
    kind = ExpandableAllocator if conf.expandable else CachingAllocator
    return kind(capacity_bytes, conf, addresses, gc_bytes)
