"""`PYTORCH_ALLOC_CONF` is read as torch reads it, and does what torch does."""

import pytest

from dstune.errors import UsageError
from dstune.estimator.allocator import CachingAllocator, round_size_in_divisions
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.expandable import ExpandableAllocator, make_allocator
from dstune.units import GIB, MIB


def test_every_key_that_changes_reserved_memory_is_read() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:64,large_segment_size_mb:32,max_non_split_rounding_mb:40,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],garbage_collection_threshold:0.6,backend:native,"
        "per_process_memory_fraction:0.5,pinned_use_background_threads:True"
    )
    conf = AllocConf.parse(text)
    assert conf.expandable
    assert (conf.max_split_bytes, conf.large_segment_bytes) == (64 * MIB, 32 * MIB)
    assert (conf.max_rounding_bytes, conf.gc_fraction, conf.memory_fraction) == (40 * MIB, 0.6, 0.5)
    sizes = (1, 200 * MIB, 256 * MIB, 600 * MIB, GIB, 3 * GIB)
    assert [conf.division(size) for size in sizes] == [1, 1, 1, 2, 8, 8]
    assert AllocConf.parse(None) == AllocConf.parse("") == AllocConf()


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true", "max_split_size_mb:19", "large_segment_size_mb:10", "foo:1", "backend:async",
        "garbage_collection_threshold:1.5", "roundup_power2_divisions:3", "roundup_power2_divisions:[3:1]",
        "large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb:x", "per_process_memory_fraction:much",
    ],
)  # fmt: skip
def test_what_torch_refuses_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        AllocConf.parse(text)


@pytest.mark.parametrize(
    ("size_mb", "divisions", "expected_mb"), [(1200, 4, 1280), (1024, 4, 1024), (1025, 8, 1152), (700, 2, 768)]
)
def test_divisions_round_up_between_powers_of_two(size_mb: int, divisions: int, expected_mb: int) -> None:
    assert round_size_in_divisions(size_mb * MIB, divisions) == expected_mb * MIB


def test_oversized_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    allocator = CachingAllocator(conf=AllocConf.parse("max_split_size_mb:64"))
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(30 * MIB)
    assert allocator.reserved == 130 * MIB
    assert allocator.malloc(90 * MIB).size == 100 * MIB
    assert allocator.reserved == 130 * MIB


def test_oversized_blocks_make_room_before_the_whole_cache_is_given_back() -> None:
    allocator = CachingAllocator(300 * MIB, AllocConf.parse("max_split_size_mb:64"))
    for block in [allocator.malloc(size * MIB) for size in (40, 100, 100)]:
        allocator.free(block)
    allocator.malloc(150 * MIB)
    assert (allocator.reserved, allocator.num_retries) == (190 * MIB, 0)


@pytest.mark.parametrize(("is_fraction", "reserved_mb"), [(True, 72), (False, 122)])
def test_garbage_is_collected_only_in_a_process_with_a_fraction(is_fraction: bool, reserved_mb: int) -> None:
    conf = AllocConf.parse("garbage_collection_threshold:0.25")
    allocator = make_allocator(conf, 200 * MIB, is_fraction=is_fraction)
    old = allocator.malloc(50 * MIB)
    allocator.malloc(12 * MIB)
    allocator.free(old)
    allocator.malloc(60 * MIB)
    assert allocator.reserved == reserved_mb * MIB


def test_expandable_segments_grow_by_the_large_segment() -> None:
    allocator = make_allocator(AllocConf.parse("expandable_segments:True,large_segment_size_mb:32"))
    assert isinstance(allocator, ExpandableAllocator)
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 64 * MIB
