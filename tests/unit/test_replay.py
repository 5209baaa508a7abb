"""Tapes: saved and loaded, replayed with and without a capacity."""

from pathlib import Path

from dstune.estimator.allocconf import AllocConf
from dstune.estimator.host import BUILD_BASE_BYTES, TRAIN_BASE_BYTES, host_memory
from dstune.estimator.replay import replay
from dstune.estimator.spread import min_capacity_bytes
from dstune.estimator.tape import HOST_PAGEABLE, HOST_PINNED, Tape
from dstune.units import MIB


def small_tape() -> Tape:
    """A cached segment of 30 MiB that a request of 36 MiB cannot use."""
    tape = Tape()
    first = tape.alloc(30 * MIB, 0, tape.label("aten::mm layer.0"))
    tape.free(first)
    tape.mark("fwd0.0")
    tape.alloc(36 * MIB, 0, tape.label("aten::mm layer.1"))
    tape.mark("bwd0.0")
    return tape


def test_the_smallest_capacity_lies_below_what_was_reserved() -> None:
    tape = small_tape()
    played = replay(tape)
    assert (played.peak_reserved, played.peak_allocated) == (66 * MIB, 36 * MIB)
    needed = min_capacity_bytes(tape, played, AllocConf())
    assert needed == 36 * MIB
    assert replay(tape, needed).shortage is None
    assert replay(tape, needed - 2 * MIB).shortage is not None


def test_a_shortage_names_operation_module_phase_and_size() -> None:
    shortage = replay(small_tape(), 34 * MIB).shortage
    assert shortage is not None
    assert (shortage.label, shortage.phase, shortage.segment_bytes) == ("aten::mm layer.1", "bwd0.0", 36 * MIB)


def test_peaks_are_counted_by_phase() -> None:
    played = replay(small_tape())
    assert [(phase.name, phase.peak_allocated) for phase in played.phases] == [
        ("fwd0.0", 30 * MIB),
        ("bwd0.0", 36 * MIB),
    ]
    assert played.peak_phase == "bwd0.0"


def test_a_tape_survives_the_disk(tmp_path: Path) -> None:
    tape = small_tape()
    tape.save(tmp_path / "a.tape")
    loaded = Tape.load(tmp_path / "a.tape")
    assert list(loaded) == list(tape)
    assert loaded.labels == tape.labels


def test_pinned_host_memory_is_rounded_to_a_power_of_two_and_reused() -> None:
    tape = Tape()
    label = tape.label("x")
    tape.alloc(1000, HOST_PAGEABLE, label)
    first = tape.alloc(5 * MIB, HOST_PINNED, label)
    tape.free(first)
    tape.alloc(7 * MIB, HOST_PINNED, label)
    memory = host_memory(tape)
    assert memory.pinned == 8 * MIB
    assert memory.pageable == BUILD_BASE_BYTES + 1000
    tape.alloc(MIB, 0, label)
    assert host_memory(tape).pageable == TRAIN_BASE_BYTES + 1000
