"""Play a tape through the allocator's model: peaks by phase, the fate under a capacity, the smallest capacity."""

from dataclasses import dataclass, field

from dstune.estimator.allocator import Block, CachingAllocator, OutOfMemoryError
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.expandable import make_allocator
from dstune.estimator.tape import Kind, Tape


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Memory at the end of a phase and its peaks since the phase before, in bytes."""

    name: str
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """The allocation that ran out of memory."""

    segment_bytes: int
    """What the driver was asked for, as torch's message has it."""
    label: str
    """Operation and module."""
    phase: str
    """The phase it belongs to, or an empty string after the last."""


@dataclass(slots=True)
class Replay:
    """The state of a replay, which can be fed in pieces.

    Attributes:
        allocator: The model that plays.
        phases: Those that ended so far.
        shortage: The allocation that failed; nothing is played after it.
    """

    allocator: CachingAllocator
    phases: list[PhaseMemory] = field(default_factory=list)
    shortage: Shortage | None = None
    _blocks: dict[int, Block] = field(default_factory=dict)
    _num_played: int = 0

    def feed(self, tape: Tape) -> None:
        """Play the events of the tape that were not played yet."""
        allocator, blocks = self.allocator, self._blocks
        if self.shortage is not None:
            return
        start, self._num_played = self._num_played, len(tape)
        for position, (kind, block, size, stream, label) in enumerate(tape.rows(start), start):
            if kind == Kind.ALLOC:
                if stream >= 0:
                    try:
                        blocks[block] = allocator.malloc(size, stream)
                    except OutOfMemoryError as error:
                        self.shortage = Shortage(error.segment_bytes, tape.labels[label], _phase_after(tape, position))
                        return
            elif kind == Kind.FREE:
                held = blocks.pop(block, None)
                if held is not None:
                    allocator.free(held)
            elif kind == Kind.MARK:
                self._mark(tape.labels[label])
            else:
                allocator.empty_cache()

    def _mark(self, name: str) -> None:
        one = self.allocator
        self.phases.append(PhaseMemory(name, one.allocated, one.peak_allocated, one.reserved, one.peak_reserved))
        one.reset_peaks()

    @property
    def peak_allocated(self) -> int:
        """Over all phases, in bytes."""
        return max(self.allocator.peak_allocated, *(phase.peak_allocated for phase in self.phases), 0)

    @property
    def peak_reserved(self) -> int:
        """Over all phases, in bytes."""
        return max(self.allocator.peak_reserved, *(phase.peak_reserved for phase in self.phases), 0)

    @property
    def peak_phase(self) -> str:
        """The phase in which most was allocated."""
        return max(self.phases, key=lambda phase: phase.peak_allocated).name if self.phases else ""


def replay(
    tape: Tape, capacity_bytes: int | None = None, conf: AllocConf | None = None, *, is_fraction: bool = False
) -> Replay:
    """Play a whole tape.

    Args:
        tape: The tape.
        capacity_bytes: The most that may be reserved.
        conf: `PYTORCH_ALLOC_CONF`.
        is_fraction: Whether the process was given the capacity as a fraction of the GPU.
    """
    state = Replay(make_allocator(conf or AllocConf(), capacity_bytes, is_fraction=is_fraction))
    state.feed(tape)
    return state


def _phase_after(tape: Tape, position: int) -> str:
    """The phase whose mark comes next."""
    for kind, _block, _size, _stream, label in tape.rows(position):
        if kind == Kind.MARK:
            return tape.labels[label]
    return ""
