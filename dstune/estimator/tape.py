"""The tape: what one rank allocated and freed, in order, with names. Plain Python; torch never comes near.

A tape outlives the process that recorded it: it can be replayed through the allocator's model with any capacity,
compared with a recording of a real GPU, saved and loaded.
"""

import json
from array import array
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self

WIDTH = 5
"""Integers an event takes: kind, block, bytes, stream, label."""

HOST_PAGEABLE = -1
HOST_PINNED = -2
HOST_LOCKED = -3
"""Streams of host memory, the last being page-locked outside torch's cache; a GPU's streams count from 0."""


class Kind(IntEnum):
    """What happened."""

    ALLOC = 0
    FREE = 1
    EMPTY_CACHE = 2
    """`torch.cuda.empty_cache()`: DeepSpeed calls it, and it changes what stays reserved."""
    MARK = 3
    """A phase ended; the label names it."""


class Event(NamedTuple):
    """One event."""

    kind: Kind
    block: int
    size_bytes: int
    stream: int
    label: int


class Tape:
    """An append-only list of events.

    Attributes:
        labels: Names that events point to: operations with their module, or phases.
    """

    def __init__(self) -> None:
        self._ints = array("q")
        self._label_numbers: dict[str, int] = {}
        self._num_blocks = 0
        self.labels: list[str] = []

    def label(self, name: str) -> int:
        """The number of a name, made on first use."""
        number = self._label_numbers.get(name)
        if number is None:
            number = self._label_numbers[name] = len(self.labels)
            self.labels.append(name)
        return number

    def alloc(self, size_bytes: int, stream: int, label: int) -> int:
        """Record an allocation; the number returned names the block in its free."""
        block = self._num_blocks
        self._num_blocks = block + 1
        self._ints.extend((Kind.ALLOC, block, size_bytes, stream, label))
        return block

    def free(self, block: int) -> None:
        """Record that a block was freed."""
        self._ints.extend((Kind.FREE, block, 0, 0, 0))

    def empty_cache(self) -> None:
        """Record a call of `empty_cache`."""
        self._ints.extend((Kind.EMPTY_CACHE, 0, 0, 0, 0))

    def mark(self, phase: str) -> None:
        """Record the end of a phase."""
        self._ints.extend((Kind.MARK, 0, 0, 0, self.label(phase)))

    def append(self, row: tuple[int, ...]) -> None:
        """Add an event as bare integers, in terms of this tape's labels and blocks."""
        self._ints.extend(row)

    @classmethod
    def like(cls, other: Self) -> Self:
        """An empty tape with another's labels and blocks."""
        tape = cls()
        tape.labels, tape._label_numbers, tape._num_blocks = other.labels, other._label_numbers, other._num_blocks
        return tape

    def __len__(self) -> int:
        return len(self._ints) // WIDTH

    def rows(self, start: int = 0) -> Iterator[tuple[int, ...]]:
        """Events as bare integers from the given one on: the fast way to replay."""
        ints = iter(self._ints[start * WIDTH :])
        return zip(ints, ints, ints, ints, ints, strict=True)

    def __iter__(self) -> Iterator[Event]:
        return (Event(Kind(kind), *rest) for kind, *rest in self.rows())

    def save(self, path: Path) -> None:
        """Write the tape: one line of JSON with the labels, then the integers."""
        with path.open("wb") as file:
            file.write(json.dumps({"labels": self.labels, "blocks": self._num_blocks}).encode() + b"\n")
            self._ints.tofile(file)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        tape = cls()
        with path.open("rb") as file:
            head = json.loads(file.readline())
            tape._ints.frombytes(file.read())
        tape.labels = head["labels"]
        tape._label_numbers = {name: number for number, name in enumerate(tape.labels)}
        tape._num_blocks = head["blocks"]
        return tape
