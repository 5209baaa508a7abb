"""The search for the largest micro-batch asks few questions and never believes its own line."""

from collections.abc import Callable

import pytest

from dstune.estimator.largest import MAX_MICRO_BATCH, search
from dstune.units import GIB, MIB


def ask(needed: Callable[[int], int], room: int) -> tuple[int, list[int]]:
    """The answer, and the micro-batches that were run."""
    probes = search(room)
    asked = [next(probes)]
    while True:
        size = needed(asked[-1])
        try:
            asked.append(probes.send((size, size <= room)))
        except StopIteration as end:
            return end.value, asked


@pytest.mark.parametrize("room_gib", [3, 17, 24, 80, 141])
@pytest.mark.parametrize(
    "needed",
    [
        lambda batch: 2 * GIB + batch * 900 * MIB,
        lambda batch: 2 * GIB + batch * 900 * MIB + batch % 2 * 600 * MIB // 2,
        lambda batch: GIB + max(batch * 400 * MIB, batch * 700 * MIB - 4 * GIB),
        lambda batch: 2 * GIB + batch // 4 * 2 * GIB,
    ],
    ids=["line", "uneven", "bend", "stairs"],
)
def test_the_answer_fits_and_one_more_does_not(needed: Callable[[int], int], room_gib: int) -> None:
    room = room_gib * GIB
    largest, asked = ask(needed, room)
    assert needed(largest) <= room < needed(largest + 1)
    assert {max(largest, 1), largest + 1} <= set(asked)
    assert len(asked) == len(set(asked)) <= 14


def test_few_runs_where_memory_grows_in_a_line() -> None:
    _, asked = ask(lambda batch: 2 * GIB + batch * 900 * MIB, 80 * GIB)
    assert len(asked) <= 4


def test_nothing_fits_and_everything_fits() -> None:
    assert ask(lambda _batch: 2 * GIB, GIB) == (0, [1])
    assert ask(lambda _batch: GIB, 2 * GIB)[0] == MAX_MICRO_BATCH
