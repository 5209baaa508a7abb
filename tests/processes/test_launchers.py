"""Every launcher starts two real ranks that train together; Slurm's programs are stand-ins that start processes."""

import os
import sys
from pathlib import Path

import pytest

from dstune.search.trial import Accelerator, Outcome
from tests.processes.study import Fault, left_behind, try_once

SRUN = f"""#!{sys.executable}
import os, re, subprocess, sys
words = sys.argv[1:]
count = int(next(re.match(r"--ntasks=(\\d+)", word)[1] for word in words if word.startswith("--ntasks=")))
command = [word for word in words if not word.startswith("--")]
ranks = [subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
    "SLURM_NTASKS": str(count)}}) for rank in range(count)]
statuses = []
for rank in ranks:
    statuses.append(rank.wait())
    if statuses[-1]:
        for other in ranks:
            other.terminate()
sys.exit(max(map(abs, statuses)))
"""
SBATCH = f"""#!{sys.executable}
import subprocess, sys
assert "--wait" in sys.argv
output = next(word.partition("=")[2] for word in sys.argv if word.startswith("--output="))
with open(output, "ab") as log:
    sys.exit(subprocess.run(["sh", sys.argv[-1]], stdout=log, stderr=log).returncode)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun`, `sbatch` and `scancel` on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("sbatch", SBATCH), ("scancel", "#!/bin/sh\nexit 0\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "srun", "sbatch"])
def test_two_ranks_train_together(launcher: str, tmp_path: Path) -> None:
    trial = try_once(Fault(launcher=launcher), tmp_path / "study", Accelerator.CPU, 2)
    assert trial.ending.outcome is Outcome.OK, trial.ending
    assert trial.has_communication
    assert left_behind(tmp_path / "study") == []


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "srun", "sbatch"])
def test_a_killed_rank_ends_the_trial_and_is_named(launcher: str, tmp_path: Path) -> None:
    trial = try_once(Fault("kill", launcher=launcher), tmp_path / "study", Accelerator.CPU, 2)
    assert trial.ending.outcome is Outcome.CRASH, trial.ending
    if launcher in {"torchrun", "deepspeed"}:  # DeepSpeed's may see only the rank that lost the other
        assert "killed" in trial.ending.detail
    assert left_behind(tmp_path / "study") == []
