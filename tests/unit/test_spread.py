"""The range of an estimate: what small changes of a tape do, and what is said of it."""

from dstune.estimator.allocconf import AllocConf
from dstune.estimator.replay import replay
from dstune.estimator.spread import (
    AS_RECORDED,
    CAPACITY_GRAIN_BYTES,
    LATE_EVERY,
    PERTURBATIONS,
    Spread,
    late,
    min_capacity_bytes,
    play,
    spread,
    verdict_of,
)
from dstune.estimator.tape import Kind, Tape
from dstune.units import MIB
from dstune.vocab import Verdict

CONF = AllocConf()


def fragmenting_tape() -> Tape:
    """Two equal free blocks, one of which can grow by its neighbour's end: which one is taken decides."""
    tape = Tape()
    label = tape.label("aten::mm layer")
    first = [tape.alloc(30 * MIB, 0, label) for _ in range(4)]
    for block in (first[0], first[2]):
        tape.free(block)
    held = tape.alloc(20 * MIB, 0, label)
    tape.alloc(30 * MIB, 0, label)
    tape.free(held)
    for number in range(40):
        block = tape.alloc((number % 5 + 1) * 3 * MIB, 0, label)
        if number % 3:
            tape.free(block)
    tape.mark("step0.0")
    return tape


def test_the_range_holds_the_estimate_itself() -> None:
    tape = fragmenting_tape()
    played = replay(tape)
    needed = min_capacity_bytes(tape, played, CONF)
    found = spread(tape, CONF, played, needed)
    assert found.low_reserved <= played.peak_reserved <= found.high_reserved
    assert found.low_capacity <= needed <= found.high_capacity
    assert found.high_reserved > found.low_reserved, "an extra large block takes room"


def test_the_range_is_that_of_trying_every_capacity() -> None:
    tape = fragmenting_tape()
    played = replay(tape)
    found = spread(tape, CONF, played, min_capacity_bytes(tape, played, CONF))
    smallest = []
    for perturbation in (AS_RECORDED, *PERTURBATIONS):
        changed = late(tape) if perturbation.late_frees else tape
        capacity = played.peak_allocated // (4 * CAPACITY_GRAIN_BYTES) * CAPACITY_GRAIN_BYTES + 4 * MIB
        while play(changed, CONF, capacity, perturbation).shortage is not None:
            capacity += CAPACITY_GRAIN_BYTES
        smallest.append(capacity)
    assert (found.low_capacity, found.high_capacity) == (min(smallest), max(smallest))
    assert min(smallest) < max(smallest), "otherwise nothing is shown"


def test_late_frees_change_the_order_and_nothing_else() -> None:
    tape = fragmenting_tape()
    changed = late(tape)
    assert sorted(changed) == sorted(tape)
    assert [*changed] != [*tape]
    frees = sum(event.kind == Kind.FREE for event in tape)
    moved = sum(one != other for one, other in zip(changed, tape, strict=True))
    assert 0 < moved <= 2 * (frees // LATE_EVERY + 1) + 1


def test_verdicts() -> None:
    found = Spread(0, 0, 10 * MIB, 14 * MIB)
    assert [verdict_of(found, room * MIB) for room in (9, 10, 13, 14)] == [
        Verdict.OVER, Verdict.TIGHT, Verdict.TIGHT, Verdict.FITS,
    ]  # fmt: skip
