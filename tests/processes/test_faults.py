"""Every way in which a trial ends has its name, and nothing of it is left: two real ranks that talk by gloo."""

from pathlib import Path

import pytest

from dstune.search import launch
from dstune.search.trial import Accelerator, Outcome, Trial
from tests.processes.study import BAD_CONFIG, Fault, left_behind, try_once


def end(fault: Fault, folder: Path) -> Trial:
    trial = try_once(fault, folder, Accelerator.CPU, 2)
    assert left_behind(folder) == []
    return trial


@pytest.mark.parametrize(
    ("fault", "outcome", "detail"),
    [
        (Fault("kill"), Outcome.CRASH, "signal 9"),
        (Fault("segfault", rank=0), Outcome.CRASH, "signal 11"),
        (Fault("stop", deadline_s=20), Outcome.HANG, "deadline"),
        (Fault("hang", rank=0, deadline_s=20), Outcome.HANG, "deadline"),
        (Fault("children"), Outcome.CRASH, "left children"),
        (Fault("host"), Outcome.OOM, "host memory ran out"),
        (Fault("disk", rank=0), Outcome.CRASH, "the disk is full"),
        (Fault("cuda"), Outcome.OOM, "GPU memory ran out"),
        (Fault("cuda", rank=0, launcher="torchrun"), Outcome.OOM, "GPU memory ran out"),
        (Fault(ds_config=BAD_CONFIG), Outcome.INVALID, "refused the configuration"),
    ],
    ids=lambda value: f"{value.kind or 'config'}-{value.launcher}" if isinstance(value, Fault) else "",
)
def test_a_failure_is_named_and_leaves_nothing(fault: Fault, outcome: Outcome, detail: str, tmp_path: Path) -> None:
    trial = end(fault, tmp_path)
    assert (trial.ending.outcome, trial.measurement) == (outcome, None)
    assert detail in trial.ending.detail
    if fault.kind in {"children", "host", "disk", "cuda"}:
        assert trial.ending.rank == fault.rank
        assert trial.ending.log_lines


def test_a_port_that_is_taken_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(launch, "free_port", lambda: taken.getsockname()[1])
        trial = end(Fault(), tmp_path)
    assert (trial.ending.outcome, trial.ending.detail) == (Outcome.CRASH, "the port was taken")


def test_without_a_fault_both_ranks_train(tmp_path: Path) -> None:
    trial = end(Fault(), tmp_path)
    assert trial.ending.outcome is Outcome.OK, trial.ending
    assert trial.measurement is not None
    assert trial.has_communication
