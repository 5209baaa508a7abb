"""Results made from what was learnt give the very tape that torch's fake dispatch gives."""

from pathlib import Path
from typing import Any

import pytest

from dstune.estimator.pool import Pool
from dstune.estimator.tape import Tape
from tests.accuracy.record import job_for, load_rows

DATA = Path(__file__).parents[1] / "data/measured"
ROWS = {
    "operations.jsonl": "ops-gpt2-eager-z0 ops-gpt2-mask-z2 ops-mixtral-z2 ops-qwen3-z3-both ops-llama-lora-z2",
    "settings.jsonl": "set-autocast-z3 set-zenflow-z3 set-dsckpt-z3-cpu set-hpz-z3",
    "families.jsonl": "new-mixtral-z3",
    "models.jsonl": "fam-debertav2-z2 fam-whisper-z3",
}


def events(tape: Tape) -> list[tuple[Any, ...]]:
    """All of a tape, with names instead of numbers."""
    return [(*event[:4], tape.labels[event.label] if event.label < len(tape.labels) else "") for event in tape]


@pytest.fixture(scope="module")
def tapes() -> dict[str, list[list[tuple[Any, ...]]]]:
    wanted = {name for names in ROWS.values() for name in names.split()}
    rows = [row for file in ROWS for row in load_rows(DATA / file) if row["name"] in wanted]
    found: dict[str, list[list[tuple[Any, ...]]]] = {row["name"]: [] for row in rows}
    with Pool() as pool:
        jobs = [
            job_for(row, pool.tape_path()).model_copy(update={"has_shortcuts": fast})
            for row in rows
            for fast in (True, False)
        ]
        for number, answer, tape in pool.run(jobs):
            assert tape is not None, answer.failure
            found[rows[number // 2]["name"]].append(events(tape))
    return found


@pytest.mark.parametrize("name", " ".join(ROWS.values()).split())
def test_the_fast_tape_is_the_slow_one(name: str, tapes: dict[str, list[list[tuple[Any, ...]]]]) -> None:
    first, second = tapes[name]
    assert len(first) == len(second) > 1000
    assert first == second
