"""Recorded studies of the real GPU: how trials ended, what was left of them, and what the pages say of them."""

import json
from pathlib import Path

from dstune.plan import TrainingPlan
from dstune.search.journal import read_lines
from dstune.search.space import track_of
from dstune.search.strategy import Climb
from dstune.vocab import Offload
from tests.bench import accumulation

STUDIES = Path(__file__).parents[1] / "data" / "studies"
WORST_REGRET = 0.03


def test_the_accumulation_page_is_the_one_of_the_recordings() -> None:
    assert accumulation.PAGE.read_text() == accumulation.page()


def test_each_forced_failure_had_its_name_and_left_nothing() -> None:
    _, *rows = [json.loads(line) for line in (STUDIES / "faults-h200.jsonl").read_text().splitlines()]
    outcomes = {(row["fault"], row["launcher"], row["deadline_s"] < 10): row["outcome"] for row in rows}
    assert len(rows) == len(outcomes) == 15
    for (fault, _, is_short), outcome in outcomes.items():
        if is_short or fault in {"stop", "hang"}:
            expected = "hang"
        elif fault in {"vram", "pinned", "nccl", "host", "cuda"}:
            expected = "oom"
        else:
            expected = "ok" if fault == "none" else "crash"
        assert outcome == expected, fault
    assert all(row["num_processes_left"] == 0 for row in rows)
    assert len({row["held_gpu_bytes"] for row in rows}) == 1
    assert all(row["held_gpu_bytes"] <= 0 for row in rows)


def test_predictions_of_the_recorded_trials_are_exact() -> None:
    path = STUDIES / "grid-gpt2-medium-24gib.jsonl"
    _, trials = read_lines(path, path.read_bytes())
    pairs = [
        (trial.predicted_bytes, trial.measurement.peak_reserved_bytes)
        for trial in trials
        if trial.predicted_bytes is not None and trial.measurement is not None
    ]
    assert len(pairs) >= 6
    assert all(predicted == measured for predicted, measured in pairs)


def test_the_pick_among_whole_steps_is_near_the_best() -> None:
    path = STUDIES / "grid-gpt2-medium-24gib.jsonl"
    _, trials = read_lines(path, path.read_bytes())
    keys = dict.fromkeys((trial.plan.zero_stage, trial.plan.offload) for trial in trials)
    tracks = [
        track_of(TrainingPlan(zero_stage=stage, offload=Offload(offload)), 16, [1, 2, 4, 8]) for stage, offload in keys
    ]
    speeds = {
        (list(keys).index((trial.plan.zero_stage, trial.plan.offload)), (1, 2, 4, 8).index(trial.plan.micro_batch)):
        trial.samples_per_s
        for trial in trials
    }  # fmt: skip
    strategy = Climb(tracks)
    num_trials = 0
    while (choice := strategy.ask()) is not None and num_trials < len(speeds):
        num_trials += 1
        strategy.tell(choice, speeds[choice])
    best = strategy.best()
    assert best is not None
    regret = 1 - speeds[best] / max(speeds.values())
    print(f"{num_trials} trials of {len(speeds)} settings, regret {regret:.1%}")
    assert regret <= WORST_REGRET
    assert num_trials < len(speeds)
