"""How sure an estimate is: the tape is replayed with small changes that a real run may have, and the spread is told.

What a real process has and the tape cannot: where the driver puts segments, a block that another library took, a free
that a stream held back for a moment. None of them changes what is allocated by more than its own size, but each can
move a large block to another place, and with it what is reserved.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dstune.estimator.allocator import AddressSpace
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.expandable import make_allocator
from dstune.estimator.replay import Replay
from dstune.estimator.tape import Kind, Tape
from dstune.units import MIB
from dstune.vocab import Verdict

CAPACITY_GRAIN_BYTES = 2 * MIB
"""Reserved memory comes in pieces of this, so a smallest capacity is looked for on this grid."""
LATE_EVERY = 11
"""One free in so many is late. A prime, so that it is not always the same one of a repeated layer."""


class RisingAddresses(AddressSpace):
    """Each segment lies above all before it."""

    def place(self, size: int) -> int:
        """The address of a new segment."""
        address, self._next = self._next, self._next + size
        return address


class ScatteredAddresses(AddressSpace):
    """Segments lie anywhere: the order is that of a fixed scramble of their number."""

    def __init__(self) -> None:
        super().__init__()
        self._num_placed = 0

    def place(self, size: int) -> int:
        """The address of a new segment; none is larger than the gap to the next."""
        del size
        self._num_placed += 1
        return (self._num_placed * 0x9E3779B1 & 0xFFFF_FFFF) << 44


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One small change.

    Attributes:
        name: What is changed.
        why: Where a real run may differ so.
        addresses: Where segments lie.
        extra_bytes: Blocks taken before the first and never given back.
        late_frees: Whether some frees come after the allocation that follows them.
    """

    name: str
    why: str
    addresses: Callable[[], AddressSpace] = AddressSpace
    extra_bytes: tuple[int, ...] = ()
    late_frees: bool = False


AS_RECORDED = Perturbation("none", "the tape itself")
PERTURBATIONS = (
    Perturbation("rising addresses", "other drivers hand address space out from the bottom", RisingAddresses),
    Perturbation("scattered addresses", "another process or library holds address space", ScatteredAddresses),
    Perturbation("an extra small block", "a counter or a seed that a library keeps", extra_bytes=(4096,)),
    Perturbation("an extra large block", "a workspace that a library keeps", extra_bytes=(4 * MIB,)),
    Perturbation("late frees", "a block that a side stream used is given back later", late_frees=True),
)
"""What is tried, each by itself."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranges over all perturbations and the tape itself, in bytes.

    Attributes:
        low_reserved, high_reserved: Peak of reserved memory without a capacity.
        low_capacity, high_capacity: The smallest capacity on which the steps run.
    """

    low_reserved: int
    high_reserved: int
    low_capacity: int
    high_capacity: int


def play(
    tape: Tape,
    conf: AllocConf,
    capacity_bytes: int | None = None,
    perturbation: Perturbation = AS_RECORDED,
    *,
    is_fraction: bool = False,
) -> Replay:
    """Replay a tape with a change; with late frees it must be the tape that `late` made."""
    addresses = perturbation.addresses()
    state = Replay(make_allocator(conf, capacity_bytes, is_fraction=is_fraction, addresses=addresses))
    for size in perturbation.extra_bytes:
        state.allocator.malloc(size)
    state.feed(tape)
    return state


def min_capacity_bytes(tape: Tape, free_run: Replay, conf: AllocConf) -> int:
    """The smallest capacity on which the tape still runs, cached segments being given back and asked for again.

    Args:
        tape: The tape.
        free_run: Its replay without a capacity, which bounds the search: less than what was allocated can never
            do, and what was reserved always does.
        conf: `PYTORCH_ALLOC_CONF`.
    """
    return CAPACITY_GRAIN_BYTES * _smallest(_runs(tape, conf, AS_RECORDED), *_bounds(free_run))


def _runs(tape: Tape, conf: AllocConf, perturbation: Perturbation) -> Callable[[int], bool]:
    """Whether the tape runs on a capacity in grains."""
    return lambda grains: play(tape, conf, grains * CAPACITY_GRAIN_BYTES, perturbation).shortage is None


def _bounds(free_run: Replay) -> tuple[int, int]:
    """In grains."""
    return free_run.peak_allocated // CAPACITY_GRAIN_BYTES, -(-free_run.peak_reserved // CAPACITY_GRAIN_BYTES)


def _smallest(runs: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number that runs; all below `low` are known not to, and `high` is known to."""
    while low < high:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle + 1
    return high


def spread(tape: Tape, conf: AllocConf, free_run: Replay, needed_bytes: int) -> Spread:
    """The ranges of a tape.

    A perturbation's own smallest capacity is looked for only where it lies outside the range so far.

    Args:
        tape: The tape.
        conf: `PYTORCH_ALLOC_CONF`.
        free_run: Its replay without a capacity.
        needed_bytes: Its smallest capacity.
    """
    reserved = [free_run.peak_reserved]
    low = high = needed_bytes // CAPACITY_GRAIN_BYTES
    for perturbation in PERTURBATIONS:
        changed = late(tape) if perturbation.late_frees else tape
        played = play(changed, conf, None, perturbation)
        reserved.append(played.peak_reserved)
        runs = _runs(changed, conf, perturbation)
        least, most = _bounds(played)
        if high < most and not runs(high):
            high = _smallest(runs, max(high + 1, least), most)
        elif low > least and runs(low - 1):
            low = _smallest(runs, least, low - 1)
    return Spread(min(reserved), max(reserved), low * CAPACITY_GRAIN_BYTES, high * CAPACITY_GRAIN_BYTES)


def verdict_of(found: Spread, room_bytes: int) -> Verdict:
    """Whether torch's allocator gets along with this much: surely, surely not, or on some runs only."""
    if found.high_capacity <= room_bytes:
        return Verdict.FITS
    return Verdict.OVER if found.low_capacity > room_bytes else Verdict.TIGHT


def late(tape: Tape) -> Tape:
    """The tape with some frees moved behind the allocation that follows them."""
    made = Tape.like(tape)
    held: tuple[int, ...] | None = None
    num_frees = 0
    for row in tape.rows():
        if row[0] == Kind.FREE and held is None:
            num_frees += 1
            if num_frees % LATE_EVERY == 0:
                held = row
                continue
        made.append(row)
        if held is not None and row[0] != Kind.FREE:
            made.append(held)
            held = None
    if held is not None:
        made.append(held)
    return made
