"""The largest micro-batch that fits: bisection, each probe a run on the virtual GPU.

Where to probe next is guessed from the memory that the probes so far needed, which grows nearly in a line; what fits is
only ever said by a run. The answer fits, and one more does not.
"""

from collections.abc import Generator
from dataclasses import dataclass, field

MAX_MICRO_BATCH = 1 << 16
"""Where the search ends for models so small that anything fits."""

NUM_GUESSES = 6
"""After so many probes the line has shown to be none, and halving takes over."""


@dataclass(slots=True)
class Search:
    """What is known so far.

    Attributes:
        room_bytes: What may be needed.
        largest: The largest micro-batch that fits, 0 if none was found.
        smallest_over: The smallest that does not, or None.
    """

    room_bytes: int
    largest: int = 0
    smallest_over: int | None = None
    _needed: dict[int, int] = field(default_factory=dict)

    def learn(self, micro_batch: int, needed_bytes: int, *, fits: bool) -> None:
        """Take the result of a probe."""
        self._needed[micro_batch] = needed_bytes
        if fits:
            self.largest = max(self.largest, micro_batch)
        else:
            self.smallest_over = min(self.smallest_over or micro_batch, micro_batch)

    @property
    def is_done(self) -> bool:
        """Whether the answer is known."""
        return self.largest >= MAX_MICRO_BATCH or self.smallest_over == self.largest + 1

    def next_probe(self) -> int:
        """The micro-batch to try next."""
        if len(self._needed) < 2:
            return len(self._needed) + 1
        lowest, highest = self.largest + 1, (self.smallest_over or MAX_MICRO_BATCH + 1) - 1
        if len(self._needed) > NUM_GUESSES:
            guess = 2 * self.largest if self.smallest_over is None else (lowest + highest) // 2
        else:
            guess = self._guess()
        return min(max(guess, lowest), highest)

    def _guess(self) -> int:
        """Where a line through the two probes nearest to the room meets it."""
        (first, low), (second, high) = sorted(self._needed.items(), key=lambda item: abs(item[1] - self.room_bytes))[:2]
        slope = (high - low) / (second - first)
        if slope <= 0:
            return 2 * max(self._needed)
        return int(first + (self.room_bytes - low) / slope)


def search(room_bytes: int) -> Generator[int, tuple[int, bool], int]:
    """Yield micro-batches to try, be sent what each needs in bytes and whether it fits, and return the largest."""
    state = Search(room_bytes)
    while not state.is_done:
        probe = state.next_probe()
        needed_bytes, fits = yield probe
        state.learn(probe, needed_bytes, fits=fits)
        if probe == 1 and not fits:
            return 0
    return state.largest
