"""A search of one setting whose model fails on purpose: real processes, real DeepSpeed, CPU or GPU."""

from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.search.journal import Journal
from dstune.search.launch import LAUNCHERS, Layout
from dstune.search.session import Limits, Session, Stage
from dstune.search.space import track_of
from dstune.search.strategy import Climb
from dstune.search.trial import Accelerator, JobOrder, Trial

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
BAD_CONFIG: dict[str, object] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1, "overlap_com": True},
    "bf16": {"enabled": True},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail.

    Attributes:
        kind: What the model does, see `tests.examples.faulty_model`; "" for nothing.
        rank: Who does it.
        launcher: Who starts the ranks.
        deadline_s: For the trial.
        ds_config: What DeepSpeed is given, if not the plan's own.
    """

    kind: str = ""
    rank: int = 1
    launcher: str = "local"
    deadline_s: float = DEADLINE_S
    ds_config: dict[str, object] | None = field(default=None, hash=False)


def try_once(fault: Fault, folder: Path, accelerator: Accelerator, num_ranks: int) -> Trial:
    """Run the one trial of a search, and return what its journal says."""
    plan = TrainingPlan(
        zero_stage=1, micro_batch=1, seq_len=8, world_size=num_ranks, ranks_per_node=num_ranks,
        client_optimizer="adamw", ds_config=fault.ds_config,
    )  # fmt: skip
    order = JobOrder(
        plan=plan,
        model=resolve("tests.examples.faulty_model:make").model_copy(update={"search_path": str(ROOT)}),
        accelerator=accelerator,
        num_processes=num_ranks,
        warmup_steps=1,
        min_steps=1,
        max_steps=1,
    )
    is_cpu = accelerator is Accelerator.CPU
    variables = {"FAULT": fault.kind, "FAULT_RANK": str(fault.rank), "PYTHONPATH": str(ROOT)}
    if is_cpu:
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    track = track_of(plan, None, [1])
    track = type(track)((plan,), track.verdicts, (None,), (None,))
    with Journal(folder, {"fault": fault.kind}) as journal:
        session = Session(
            [track],
            Stage(LAUNCHERS[fault.launcher], Layout(1, num_ranks, None, variables), order, folder.absolute()),
            journal,
            Limits(600, 1, fault.deadline_s),
            Climb([track]),
            lambda _trial, _best: None,
        )
        session.run()
        return journal.trials[0]


def left_behind(folder: Path) -> list[str]:
    """Processes of a study, or of their children, that are still there."""
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(folder) in line]
