"""Which setting to try next. Knows what was predicted and measured; never starts anything.

`Climb` takes each track at the largest micro-batch that surely fits, since throughput nearly always grows with it,
skips tracks that cannot win any more, climbs around the best, and repeats the two best, since clocks and neighbours
make single measurements lie.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dstune.search.space import Track
from dstune.vocab import Verdict

Choice = tuple[int, int]
"""(track, position in it)."""

DOUBLING_GAIN = 1.35
"""What a doubled micro-batch is allowed to bring where no pair was measured: more than in nearly all recorded runs."""
RECOMPUTATION = 0.85
"""Throughput with activation checkpointing against the same without it, at best: a third of the forward's and
backward's operations are added, of which some hide behind memory traffic."""
STAGE_DOUBT = 1.1
"""How much faster a dearer ZeRO stage may be at the same micro-batch: stages order their communication differently."""
TIE = 0.01
"""Throughputs this near to each other are equal; less memory decides."""
NUM_REPEATED = 2
"""The best so many are measured twice."""


class Strategy(Protocol):
    """Ask what to try, tell what came out."""

    def ask(self) -> Choice | None:
        """The next setting, or None when there is nothing left to learn."""

    def tell(self, choice: Choice, samples_per_s: float, reserved_bytes: int | None = None) -> None:
        """What a trial showed; 0 if it did not end well."""

    def best(self) -> Choice | None:
        """The setting to recommend, if any trial ended well."""


@dataclass(slots=True)
class Climb:
    """The default strategy.

    Attributes:
        tracks: What may be tried.
        capacity_bytes: What torch may take of a GPU, or None.
    """

    tracks: Sequence[Track]
    capacity_bytes: int | None = None
    _seen: dict[Choice, list[float]] = field(default_factory=dict)
    _failed: set[Choice] = field(default_factory=set)
    _reserved: dict[Choice, int] = field(default_factory=dict)
    _correction_bytes: int = 0

    def ask(self) -> Choice | None:
        """The next setting, or None."""
        return next(self._wishes(), None)

    def tell(self, choice: Choice, samples_per_s: float, reserved_bytes: int | None = None) -> None:
        """Take a result. A measured peak corrects what was predicted for all others."""
        if samples_per_s <= 0:
            self._failed.add(choice)
            return
        self._seen.setdefault(choice, []).append(samples_per_s)
        if reserved_bytes is not None:
            self._reserved[choice] = reserved_bytes
            predicted = self._of(self.tracks[choice[0]].reserved_bytes, choice[1])
            if predicted is not None:
                self._correction_bytes = max(self._correction_bytes, reserved_bytes - predicted)

    def best(self) -> Choice | None:
        """The fastest; among equals the one with less memory, then the cheaper track."""
        ranked = self.ranking()
        if not ranked:
            return None
        top = self._speed(ranked[0])
        equals = [choice for choice in ranked if self._speed(choice) >= top * (1 - TIE)]
        return min(equals, key=lambda choice: (self._reserved.get(choice, 0), self.tracks[choice[0]].cost, choice))

    def ranking(self) -> list[Choice]:
        """All that ended well, fastest first."""
        return sorted(self._seen, key=lambda choice: (-self._speed(choice), choice))

    def _wishes(self) -> Iterator[Choice]:
        """What would be worth a trial, most urgent first."""
        for number in sorted(range(len(self.tracks)), key=lambda number: self.tracks[number].cost):
            start = self._start(number) if self.tracks[number].base is None else None
            if start is not None and not self._is_opened(number) and self._may_win(number, start):
                yield (number, start)
        for choice in self._leaders():
            yield from self._around(choice)
        yield from self._varied()
        for choice in self.ranking()[:NUM_REPEATED]:
            if len(self._seen[choice]) == 1 and len(self._seen) > 1:
                yield choice

    def _leaders(self) -> list[Choice]:
        """The best setting of each of the two fastest tracks."""
        found: dict[int, Choice] = {}
        for choice in self.ranking():
            found.setdefault(choice[0], choice)
        leaders = list(found.values())[:2]
        return [choice for choice in leaders if self._speed(choice) > self._speed(leaders[0]) / DOUBLING_GAIN]

    def _around(self, choice: Choice) -> Iterator[Choice]:
        """The larger neighbour, then the smaller one, of a track's best setting."""
        number, position = choice
        for other in (position + 1, position - 1):
            if 0 <= other < len(self.tracks[number].plans) and self._is_open((number, other)):
                yield (number, other)

    def _varied(self) -> Iterator[Choice]:
        """The best setting with one key changed."""
        best = self.best()
        if best is None:
            return
        base = self.tracks[best[0]].base
        home = best[0] if base is None else base
        for number, track in enumerate(self.tracks):
            if track.base == home and not self._is_opened(number) and self._is_open((number, best[1])):
                yield (number, best[1])

    def _start(self, number: int) -> int | None:
        """The largest position that surely fits, else the smallest that may."""
        track = self.tracks[number]
        open_ones = [position for position in track.candidates() if self._is_open((number, position), again=True)]
        sure = [position for position in open_ones if track.verdicts[position] is Verdict.FITS]
        return sure[-1] if sure else next(iter(open_ones), None)

    def _is_opened(self, number: int) -> bool:
        """Whether anything of the track was measured, or nothing of it is left."""
        return any(track == number for track, _ in self._seen)

    def _is_open(self, choice: Choice, *, again: bool = False) -> bool:
        """Whether a setting may still be tried: not measured, not beyond a failure, not too large."""
        number, position = choice
        if (choice in self._seen and not again) or choice in self._failed:
            return False
        if any(track == number and failed <= position for track, failed in self._failed):
            return False
        verdict = self.tracks[number].verdicts[position]
        if verdict is Verdict.TIGHT and self.capacity_bytes is not None:
            needed = self._of(self.tracks[number].needed_bytes, position)
            return needed is None or needed + self._correction_bytes <= self.capacity_bytes
        return verdict is not Verdict.OVER

    def _may_win(self, number: int, start: int) -> bool:
        """Whether a track, at its largest micro-batch, could be faster than the best so far."""
        if not self._seen:
            return True
        mine = self.tracks[number]
        for choice in self._seen:
            other = self.tracks[choice[0]]
            if not _is_no_dearer(other.cost, mine.cost):
                continue
            bound = self._speed(choice) * self._gain(choice, mine.plans[start].micro_batch)
            if mine.cost[1] and not other.cost[1]:
                bound *= RECOMPUTATION
            if mine.cost[2] != other.cost[2]:
                bound *= STAGE_DOUBT
            if bound <= max(map(self._speed, self._seen)):
                return False
        return True

    def _gain(self, choice: Choice, micro_batch: int) -> float:
        """What a larger micro-batch may bring at most, from the steepest growth measured near it."""
        number, position = choice
        own = self.tracks[number].plans[position].micro_batch
        if micro_batch <= own:
            return 1.0
        slopes = [
            math.log2(self._speed(choice) / self._speed((number, other)))
            / math.log2(own / self.tracks[number].plans[other].micro_batch)
            for track, other in self._seen
            if track == number and other < position
        ]
        slope = max(0.0, *slopes) if slopes else math.log2(DOUBLING_GAIN)
        return float(2 ** (slope * math.log2(micro_batch / own)))

    def _speed(self, choice: Choice) -> float:
        return statistics.fmean(self._seen[choice])

    @staticmethod
    def _of(values: Sequence[int | None], position: int) -> int | None:
        return values[position] if position < len(values) else None


def _is_no_dearer(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a track does no more communication, recomputation or copying than another, in every respect."""
    return all(left <= right for left, right in zip(one, other, strict=True))
