"""The loop of a search: ask the strategy, run the trial, write it down, tell the strategy."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstune.errors import MachineError
from dstune.search.buildlock import build_locks, release
from dstune.search.diagnose import Evidence, diagnose
from dstune.search.gpumemory import GpuMemory
from dstune.search.journal import Journal
from dstune.search.launch import Launcher, Layout
from dstune.search.space import Track
from dstune.search.strategy import Choice, Strategy
from dstune.search.trial import Accelerator, Ending, JobOrder, Measurement, Outcome, Trial
from dstune.units import GIB

CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
"""Where Linux counts processes that it killed for memory (cgroup version 2)."""
LOG_LINES = 400
"""Last lines of a rank's log that are looked at."""

CUT = "cut short by --budget"
"""How the detail of a trial begins that would have had more time, had the search."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop.

    Attributes:
        budget_s: For the whole study, in this call.
        max_trials: Of the whole study, earlier calls included.
        trial_timeout_s: For one trial.
    """

    budget_s: float = 900.0
    max_trials: int = 12
    trial_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Where trials run.

    Attributes:
        launcher: Starts them.
        layout: Nodes and processes.
        template: The order of every trial but for its plan.
        folder: The study's folder.
    """

    launcher: Launcher
    layout: Layout
    template: JobOrder
    folder: Path


@dataclass(slots=True)
class Session:
    """A running search.

    Attributes:
        tracks: What may be tried.
        stage: Where.
        journal: Open.
        limits: When to stop.
        strategy: What to try.
        on_trial: Called with each trial as it ends, and the best so far.
        is_interrupted: Whether Ctrl-C ended it.
        stopped_by: What ended it, in words.
    """

    tracks: Sequence[Track]
    stage: Stage
    journal: Journal
    limits: Limits
    strategy: Strategy
    on_trial: Callable[[Trial, Trial | None], None] = lambda _trial, _best: None
    is_interrupted: bool = False
    stopped_by: str = ""
    _choices: dict[str, Choice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = {
            plan.digest(): (number, position)
            for number, track in enumerate(self.tracks)
            for position, plan in enumerate(track.plans)
        }
        for trial in self.journal.trials:
            self._tell(trial)

    @property
    def best(self) -> Trial | None:
        """The setting to recommend, as the fastest of its trials showed it."""
        choice = self.strategy.best()
        if choice is None:
            return None
        digest = self.tracks[choice[0]].plans[choice[1]].digest()
        mine = [trial for trial in self.journal.trials if trial.measurement and trial.plan.digest() == digest]
        return max(mine, key=lambda trial: trial.samples_per_s)

    def run(self) -> None:
        """Run trials until the strategy has no question left or a limit is reached."""
        started = time.monotonic()
        memory = GpuMemory()
        while True:
            choice = self.strategy.ask()
            if choice is None:
                self.stopped_by = "nothing left to learn"
            elif len(self.journal.trials) >= self.limits.max_trials:
                self.stopped_by = f"--max-trials {self.limits.max_trials}"
            elif time.monotonic() - started >= self.limits.budget_s:
                self.stopped_by = "--budget"
            if self.stopped_by or choice is None:
                return
            left = self.limits.budget_s - (time.monotonic() - started)
            trial = self._try(choice, min(self.limits.trial_timeout_s, max(left, 1.0)), memory)
            self.journal.add(trial)
            if trial.ending.outcome is Outcome.INTERRUPTED:
                self.is_interrupted = not trial.ending.detail.startswith(CUT)
                self.stopped_by = "" if self.is_interrupted else "--budget"
                return
            self._tell(trial)
            self.on_trial(trial, self.best)

    def _tell(self, trial: Trial) -> None:
        choice = self._choices.get(trial.plan.digest())
        if choice is not None:
            reserved = trial.measurement.peak_reserved_bytes if trial.measurement else None
            self.strategy.tell(choice, trial.samples_per_s, reserved)

    def _try(self, choice: Choice, timeout_s: float, memory: GpuMemory) -> Trial:
        """One trial, to its very end: no process and no GPU memory is left of it."""
        track = self.tracks[choice[0]]
        plan = track.plans[choice[1]]
        number = len(self.journal.trials) + 1
        folder = self._folder(number)
        order = self.stage.template.model_copy(update={"plan": plan})
        (folder / "order.json").write_text(order.model_dump_json())
        kills, locks = _kernel_kills(), build_locks()
        start = time.monotonic()
        try:
            launched = self.stage.launcher.run(self.stage.layout, folder, timeout_s)
        except KeyboardInterrupt:
            ending, measured = Ending(outcome=Outcome.INTERRUPTED, detail="Ctrl-C"), None
        else:
            measured = _measurement(folder, order.num_processes)
            evidence = Evidence(
                statuses=launched.statuses,
                logs=_logs(folder, order.num_processes),
                refused=_refused(folder, order.num_processes),
                timed_out=launched.timed_out,
                kernel_killed=_kernel_kills() > kills,
                locks=tuple(sorted(map(str, locks & build_locks()))),
                launcher=_last_lines(folder / "launcher.log"),
            )
            ending = Ending(outcome=Outcome.OK) if measured else diagnose(evidence)
            if ending.outcome is Outcome.HANG and timeout_s < self.limits.trial_timeout_s:
                said = {"outcome": Outcome.INTERRUPTED, "detail": f"{CUT}, {ending.detail}"}
                ending = ending.model_copy(update=said)  # nothing against the setting: a resumed search tries it again
        wall_s = time.monotonic() - start
        release(build_locks() - locks)
        missing = memory.wait_until_back() if order.accelerator is Accelerator.CUDA else 0
        if missing:
            raise MachineError(
                f"{missing / GIB:.1f} GiB of GPU memory did not come back after trial {number}",
                hint="see who holds it with nvidia-smi; the search can be resumed",
            )
        return Trial(
            number=number,
            plan=plan,
            ending=ending,
            measurement=measured if ending.outcome is Outcome.OK else None,
            wall_s=wall_s,
            predicted_bytes=track.reserved_bytes[choice[1]],
            log_folder=str(folder.relative_to(self.stage.folder)),
            has_communication=order.num_processes == plan.world_size,
        )

    def _folder(self, number: int) -> Path:
        """A fresh folder; what an interrupted attempt left keeps its own."""
        attempt = 0
        while True:
            folder = self.stage.folder / "trials" / (f"{number:04}" + (f"-{attempt}" if attempt else ""))
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                attempt += 1
            except OSError as error:
                raise MachineError(f"`{folder}` cannot be made", because=(str(error),)) from error
            else:
                return folder


def _measurement(folder: Path, num_ranks: int) -> Measurement | None:
    """Rank 0's, if every rank came through."""
    reports = [_report(folder, rank).get("measurement") for rank in range(num_ranks)]
    return Measurement.model_validate(reports[0]) if all(reports) else None


def _refused(folder: Path, num_ranks: int) -> frozenset[int]:
    return frozenset(rank for rank in range(num_ranks) if _report(folder, rank).get("refused"))


def _report(folder: Path, rank: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _logs(folder: Path, num_ranks: int) -> dict[int, list[str]]:
    """The last lines of each rank's log; the launcher's own as rank 0's where no rank came to life."""
    files = {rank: folder / f"rank-{rank}.log" for rank in range(num_ranks)}
    logs = {rank: _last_lines(file) for rank, file in files.items() if file.exists()}
    if not any(logs.values()) and (lines := _last_lines(folder / "launcher.log")):
        logs[0] = lines
    return logs


def _last_lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def _kernel_kills() -> int:
    """Processes of this cgroup that the kernel has killed for memory."""
    try:
        lines = CGROUP_EVENTS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
