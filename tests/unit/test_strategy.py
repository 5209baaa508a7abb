"""The strategy against recorded grids: how near its pick is to the best of all, and with how many trials.

Every micro-batch of every track of a grid was run on a real GPU. The strategy sees only what it asks for. Which
settings run out of memory is known to it, as the estimator knows it; what is missing in a grid counts as too large.
"""

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstune.dsconfig import varied_keys
from dstune.plan import TrainingPlan
from dstune.search.space import Track, track_of, variants
from dstune.search.strategy import Choice, Climb
from dstune.vocab import Checkpointing, Offload, Verdict
from tests.accuracy.record import load_rows

DATA = Path(__file__).parents[1] / "data/measured"
GLOBAL_BATCH = 48
MAX_TRIALS = 12
WORST_REGRET = 0.03


class Grid:
    """One model under one cap."""

    def __init__(self, points: dict[tuple[int, Offload, bool], dict[int, list[tuple[float, float]]]]) -> None:
        self.speeds: dict[Choice, float] = {}
        self.num_settings = 0
        """All that were run, those that ran out of memory included."""
        self.tracks: list[Track] = []
        for (stage, offload, checkpointing), sizes in sorted(points.items()):
            plan = TrainingPlan(
                zero_stage=stage,
                offload=offload,
                activation_checkpointing=Checkpointing.ON if checkpointing else Checkpointing.OFF,
            )
            track = track_of(plan, GLOBAL_BATCH, None)
            known = [plan.micro_batch in sizes for plan in track.plans]
            if not any(known):
                continue
            verdicts = tuple(Verdict.FITS if is_known else Verdict.OVER for is_known in known)
            number = len(self.tracks)
            self.tracks.append(replace(track, verdicts=verdicts))
            for position, one in enumerate(track.plans):
                if one.micro_batch in sizes:
                    step_s = statistics.median(
                        first * (one.gradient_accumulation_steps - 1) + last for first, last in sizes[one.micro_batch]
                    )
                    self.speeds[number, position] = GLOBAL_BATCH / step_s

    def search(self) -> tuple[int, float]:
        """Trials, and how much slower the pick is than the best of the grid."""
        strategy = Climb(self.tracks)
        num_trials = 0
        while num_trials < MAX_TRIALS and (choice := strategy.ask()) is not None:
            num_trials += 1
            strategy.tell(choice, self.speeds[choice])
        best = strategy.best()
        assert best is not None
        return num_trials, 1 - self.speeds[best] / max(self.speeds.values())


def offload_of(zero: dict[str, Any]) -> Offload:
    if "offload_param" in zero:
        return Offload.OPTIMIZER_PARAM
    return Offload.OPTIMIZER if "offload_optimizer" in zero else Offload.NONE


def recorded_grids() -> dict[str, Grid]:
    points: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    settings: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for row in load_rows(DATA / "throughput.jsonl"):
        zero = row["ds_config"]["zero_optimization"]
        key = (zero["stage"], offload_of(zero), row["activation_checkpointing"])
        for point in row["points"]:
            name = f"{row['name'].split('-')[1]}-{point['cap_gib']}GiB"
            settings[name].add((*key, point["micro_batch"]))
            if point["status"] == "ok":
                first, *_, last = point["micro_step_s"]
                points[name][key][point["micro_batch"]].append((first, last))
    grids = {name: Grid(grid) for name, grid in points.items()}
    for name, grid in grids.items():
        grid.num_settings = len(settings[name])
    return grids


GRIDS = recorded_grids()


@pytest.mark.parametrize("name", GRIDS)
def test_the_pick_is_near_the_best_of_the_grid(name: str) -> None:
    grid = GRIDS[name]
    num_trials, regret = grid.search()
    print(f"{name}: {num_trials} trials of {grid.num_settings} settings, regret {regret:.1%}")
    assert num_trials <= MAX_TRIALS
    assert num_trials * 3 <= grid.num_settings
    assert regret <= WORST_REGRET


def test_keys_are_varied_around_the_winner_only() -> None:
    """With `--axes`, a key is changed at the best setting alone, and the faster value wins."""
    stages = [track_of(TrainingPlan(zero_stage=stage), 16, [4, 8]) for stage in (1, 2)]
    varied = variants(stages, ["overlap_comm", "reduce_bucket_size"])
    tracks = [*stages, *varied]
    strategy = Climb(tracks)
    tried: list[Choice] = []
    while (choice := strategy.ask()) is not None and len(tried) < MAX_TRIALS:
        tried.append(choice)
        track, position = choice
        stage = tracks[track].plans[0].zero_stage
        overlaps = varied_keys(tracks[track].plans[0]).get("overlap_comm")
        strategy.tell(choice, {1: 10.0, 2: 8.0}[stage] * (1 + position / 10) * (1.2 if overlaps else 1))
    assert {tracks[track].base for track, _ in tried if tracks[track].base is not None} == {0}
    assert len({track for track, _ in tried if tracks[track].base == 0}) == sum(one.base == 0 for one in varied)
    best = strategy.best()
    assert best is not None
    assert tracks[best[0]].plans[best[1]].micro_batch == 8
    assert varied_keys(tracks[best[0]].plans[0]) == {"overlap_comm": True}


def test_a_varied_key_that_runs_out_of_memory_costs_one_trial() -> None:
    stages = [track_of(TrainingPlan(zero_stage=2), 16, [4, 8])]
    tracks = [*stages, *variants(stages, ["overlap_comm"])]
    strategy = Climb(tracks)
    tried: list[Choice] = []
    while (choice := strategy.ask()) is not None and len(tried) < MAX_TRIALS:
        tried.append(choice)
        strategy.tell(choice, 0.0 if choice[0] == 1 else 10.0 + choice[1])
    assert [choice for choice in tried if choice[0] == 1] == [(1, 1)]
    assert strategy.best() == (0, 1)
