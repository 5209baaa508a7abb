"""Start a trial's processes, watch them, and leave nothing behind: on this node, by a host file, or through Slurm."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from dstune.errors import MachineError
from dstune.lineage import adopt_orphans

POLL_S = 0.05
GRACE_S: float = 3.0
"""Between being asked to end and being killed."""
JOB = "dstune.search.job"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a trial's processes run.

    Attributes:
        num_nodes: Nodes.
        per_node: Processes a node.
        hostfile: DeepSpeed's host file, or None for this node.
        environment: Variables added to ours.
    """

    num_nodes: int = 1
    per_node: int = 1
    hostfile: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launched:
    """How the processes ended.

    Attributes:
        statuses: Exit status of each process that was started here; negative for a signal.
        timed_out: Whether the deadline passed.
    """

    statuses: tuple[int, ...]
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Launcher:
    """One way to start the ranks.

    Attributes:
        name: What the user types.
        needs: An executable that must be there.
        commands: (layout, trial's folder, port) -> commands with their variables.
        cancel: Command that ends what the launcher left with a scheduler, given the trial's folder.
    """

    name: str
    needs: str | None
    commands: Callable[[Layout, Path, int], list[tuple[list[str], dict[str, str]]]]
    cancel: Callable[[Path], list[str]] | None = None

    def check(self) -> None:
        """Raise MachineError if the launcher's program is not there."""
        if self.needs is not None and shutil.which(self.needs) is None:
            raise MachineError(f"`{self.needs}` is not here", hint="pass another --launcher, such as local")

    def run(self, layout: Layout, folder: Path, timeout_s: float) -> Launched:
        """Run a trial and wait until nothing of it is left. A KeyboardInterrupt passes, after the same clean-up."""
        commands = self.commands(layout, folder, free_port())
        processes: list[subprocess.Popen[bytes]] = []
        adopt_orphans()
        others = frozenset(_descendants())
        try:
            with (folder / "launcher.log").open("ab") as log:
                for words, variables in commands:
                    environment = {**os.environ, **layout.environment, **variables}
                    processes.append(_start(words, environment, log))
            timed_out = _watch(processes, time.monotonic() + timeout_s)
        finally:
            _end(processes, others)
            if self.cancel is not None:
                with contextlib.suppress(OSError):
                    subprocess.run(self.cancel(folder), check=False, capture_output=True)
        return Launched(tuple(process.returncode for process in processes), timed_out)


def _descendants() -> dict[int, psutil.Process]:
    """All processes that came of this one, those whose parents have died included."""
    return {process.pid: process for process in psutil.Process().children(recursive=True)}


def _start(words: list[str], environment: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """A process in a session of its own, so that a Ctrl-C of ours is not its."""
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )


def _watch(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended or one has failed; True if the deadline came first."""
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if all(status is not None for status in statuses) or any(statuses):
            return False
        time.sleep(POLL_S)
    return True


def _end(processes: Sequence[subprocess.Popen[bytes]], others: frozenset[int]) -> None:
    """Ask every process that the trial brought into the world to end, then kill what is left, until none is."""
    grace_s = GRACE_S
    while family := [process for pid, process in _descendants().items() if pid not in others]:
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.terminate() if grace_s else member.kill()
        psutil.wait_procs(family, timeout=grace_s or GRACE_S)
        grace_s = 0
    for process in processes:
        process.wait()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _job(folder: Path) -> list[str]:
    return [sys.executable, "-m", JOB, str(folder)]


def _local(layout: Layout, folder: Path, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """Each rank is started here."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(layout.per_node)}
    return [
        (_job(folder), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(layout.per_node)})
        for rank in range(layout.per_node)
    ]


def _torchrun(layout: Layout, folder: Path, port: int) -> list[tuple[list[str], dict[str, str]]]:
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={layout.per_node}"]
    return [([*words, f"--master-port={port}", "-m", JOB, str(folder)], {})]


def _deepspeed(layout: Layout, folder: Path, port: int) -> list[tuple[list[str], dict[str, str]]]:
    where = (
        [] if layout.hostfile is None else ["--hostfile", str(layout.hostfile), "--num_nodes", str(layout.num_nodes)]
    )
    words = ["deepspeed", *where, "--num_gpus", str(layout.per_node), "--master_port", str(port)]
    # else it puts --local_rank before our one argument
    return [([*words, "--no_local_rank", "--module", JOB, str(folder)], {})]


def _srun(layout: Layout, folder: Path, port: int) -> list[tuple[list[str], dict[str, str]]]:
    return [([*_srun_words(layout), *_job(folder)], {"MASTER_ADDR": _first_host(), "MASTER_PORT": str(port)})]


def _srun_words(layout: Layout) -> list[str]:
    return [
        "srun", "--kill-on-bad-exit=1", f"--nodes={layout.num_nodes}",
        f"--ntasks={layout.num_nodes * layout.per_node}", f"--ntasks-per-node={layout.per_node}",
    ]  # fmt: skip


def _sbatch(layout: Layout, folder: Path, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """Outside an allocation: one is asked for, for each trial; `--wait` ends when it does."""
    script = folder / "job.sh"
    srun = " ".join([*_srun_words(layout), *_job(folder)])
    script.write_text(
        "#!/bin/sh\n"
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)\n'
        f"export MASTER_ADDR=${{MASTER_ADDR:-127.0.0.1}} MASTER_PORT={port}\n"
        f"exec {srun}\n"
    )
    words = ["sbatch", "--wait", f"--job-name={_job_name(folder)}", f"--nodes={layout.num_nodes}"]
    tasks = [f"--ntasks-per-node={layout.per_node}", f"--gpus-per-node={layout.per_node}"]
    return [([*words, *tasks, f"--output={folder / 'launcher.log'}", str(script)], {})]


def _scancel(folder: Path) -> list[str]:
    return ["scancel", f"--name={_job_name(folder)}"]


def _job_name(folder: Path) -> str:
    return f"dstune-{os.getpid()}-{folder.name}"


def _first_host() -> str:
    """The allocation's first node, where rank 0 runs."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None or shutil.which("scontrol") is None:
        return "127.0.0.1"
    found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)  # noqa: S607
    return (found.stdout.split() or ["127.0.0.1"])[0]


LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        Launcher("local", None, _local),
        Launcher("torchrun", None, _torchrun),
        Launcher("deepspeed", "deepspeed", _deepspeed),
        Launcher("srun", "srun", _srun),
        Launcher("sbatch", "sbatch", _sbatch, _scancel),
    )
}


def default_launcher(layout: Layout) -> str:
    """Slurm where it is, DeepSpeed's own for a host file, else this node."""
    if layout.hostfile is not None:
        return "deepspeed"
    if layout.num_nodes > 1 or "SLURM_JOB_ID" in os.environ:
        return "srun" if "SLURM_JOB_ID" in os.environ else "sbatch"
    return "local"
