"""The allocator's model against recorded event lists, and what must hold for any sequence."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstune.estimator.allocator import AddressSpace, Block, CachingAllocator, OutOfMemoryError, round_size, segment_size
from dstune.estimator.expandable import ExpandableAllocator
from dstune.units import MIB

EVENTS = sorted((Path(__file__).parents[1] / "data/measured/events").glob("*.json.gz"))
NATIVE = [path for path in EVENTS if "-exp" not in path.name]


class RecordedAddresses(AddressSpace):
    """Segments lie where the recording has them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[int] = []

    def place(self, size: int) -> int:
        return self.waiting.pop(0) if self.waiting else super().place(size)


def replayed(path: Path, allocator: CachingAllocator, addresses: RecordedAddresses) -> Iterator[tuple[int, Block, int]]:
    """Feed a recorded list to an allocator; after each allocation, the recorded address, our block, reserved memory."""
    blocks: dict[int, Block] = {}
    real, before = 0, ""
    for action, address, size, stream, *_label in json.loads(gzip.decompress(path.read_bytes())):
        if action in {"segment_alloc", "segment_map"}:
            real += size
            addresses.waiting.append(address)
        elif action in {"segment_free", "segment_unmap"}:
            if before != action:
                allocator.empty_cache()
            real -= size
        elif action == "alloc":
            blocks[address] = allocator.malloc(size, stream)
            yield address, blocks[address], real
        elif action == "free_completed" and address in blocks:
            allocator.free(blocks.pop(address))
        before = action
    assert real > 0


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_reserved_memory_and_every_address_are_the_recorded_ones(path: Path) -> None:
    addresses = RecordedAddresses()
    allocator = CachingAllocator(addresses=addresses)
    for number, (address, block, real) in enumerate(replayed(path, allocator, addresses)):
        assert (allocator.reserved, block.address) == (real, address), f"allocation {number}"


@pytest.mark.parametrize("path", [path for path in EVENTS if "-exp" in path.name], ids=lambda path: path.name)
def test_expandable_segments_map_what_was_recorded(path: Path) -> None:
    allocator = ExpandableAllocator()
    for number, (_address, _block, real) in enumerate(replayed(path, allocator, RecordedAddresses())):
        assert allocator.reserved == real, f"allocation {number}"


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 2), st.booleans()), max_size=60))
@settings(deadline=None, max_examples=60)
def test_blocks_never_overlap_and_everything_merges_back(
    kind: type[CachingAllocator], steps: list[tuple[int, int, bool]]
) -> None:
    allocator = kind()
    live: list[Block] = []
    for size, stream, give_back in steps:
        live.append(allocator.malloc(size, stream))
        if give_back:
            allocator.free(live.pop(len(live) // 2))
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated == allocator.reserved == 0


def test_sizes_and_segments_are_torchs() -> None:
    assert [round_size(size) for size in (1, 512, 513)] == [512, 512, 1024]
    assert [segment_size(size, 20 * MIB) // MIB for size in (512, MIB, MIB + 512, 10 * MIB, 11 * MIB)] == [
        2,
        2,
        20,
        10,
        12,
    ]


def test_a_capacity_gives_cached_segments_back_before_it_fails() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(36 * MIB)
    assert (allocator.num_retries, allocator.reserved) == (1, 36 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(12 * MIB)
    assert (caught.value.segment_bytes, caught.value.free_bytes) == (12 * MIB, 4 * MIB)
