"""Start the worker, hand out jobs, collect answers and tapes. Never imports torch.

One worker imports everything once and forks for each job; whatever happens here, no process of it survives.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dstune.errors import InternalError, MachineError
from dstune.estimator.job import Answer, Failure, Job
from dstune.estimator.tape import Tape

START_TIMEOUT_S = 300.0
"""How long the imports may take; a cold network disk is slow."""
LOG_TAIL_LINES = 15
"""Lines of the worker's log that an error shows."""


T = TypeVar("T")
Outcome = tuple[Answer, Tape | None]
"""What a job says, and its tape if it was wanted."""
Task = Generator[Job, Outcome, T]
"""Work that takes one job or several, one after the other."""


def _alone(job: Job) -> Task[Outcome]:
    outcome = yield job
    return outcome


class Pool:
    """A running worker.

    Args:
        num_parallel: Forks that may run at once.
        on_load: Called before the worker is started, which happens when the first job is handed out.
    """

    def __init__(self, num_parallel: int | None = None, on_load: Callable[[], None] = lambda: None) -> None:
        self._on_load = on_load
        self._num_parallel = num_parallel or len(os.sched_getaffinity(0))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._unread = b""
        self._num_given = self._num_started = 0

    def __enter__(self) -> Self:
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="dstune-")
        except OSError as error:
            raise _cannot_start(error) from error
        self.workdir = Path(self._temporary.name)
        self._log = self.workdir / "worker.log"
        return self

    def load(self) -> None:
        """Start the worker, unless it runs; it imports while others wait."""
        if self._process is not None:
            return
        self._on_load()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dstune.estimator.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env=_environment(),
                )
        except OSError as error:
            raise _cannot_start(error) from error

    def wait_until_loaded(self) -> None:
        """Start the worker and return when its imports are done."""
        self.load()
        while not self._ready:
            for _ in self._messages():
                pass

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def tape_path(self) -> str:
        """A fresh path for a job's tape."""
        self._num_given += 1
        return str(self.workdir / f"{self._num_given}.tape")

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Answer, Tape | None]]:
        """Run jobs and yield each as it ends: its position, the answer, the tape unless it failed."""
        for number, (answer, tape) in self.drive([_alone(job) for job in jobs]):
            yield number, answer, tape

    def drive(self, tasks: Sequence[Task[T]]) -> Iterator[tuple[int, T]]:
        """Run tasks side by side and yield each as it ends: its position and result.

        Args:
            tasks: Generators that yield a job, are sent its outcome, and return a result.
        """
        waiting = list(enumerate(tasks))
        running: dict[int, tuple[int, Task[T], Job]] = {}
        while waiting or running:
            while waiting and len(running) < self._num_parallel:
                position, task = waiting.pop(0)
                try:
                    first = next(task)
                except StopIteration as end:  # it needed no job
                    yield position, end.value
                else:
                    running[self._start(first)] = (position, task, first)
            for message in self._messages() if running else ():
                if "number" not in message:
                    continue
                position, task, job = running.pop(message["number"])
                outcome = self._collect(message["number"], job, message["status"])
                try:
                    following = task.send(outcome)
                except StopIteration as end:
                    yield position, end.value
                else:
                    running[self._start(following)] = (position, task, following)

    def _start(self, job: Job) -> int:
        """Hand a job out; the number returned names it."""
        self.load()
        self._num_started += 1
        self._send(self._num_started, job)
        return self._num_started

    def _send(self, number: int, job: Job) -> None:
        path = self._answer_path(number)
        path.unlink(missing_ok=True)
        request = {"number": number, "job": job.model_dump(mode="json"), "answer_path": str(path)}
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._death() from error

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What the worker has said since the last call; waits for at least one line."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not self._ready and not select.select([pipe], [], [], START_TIMEOUT_S)[0]:
                raise self._death()
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                raise self._death()
            self._unread += chunk
        self._ready = True
        *lines, self._unread = self._unread.split(b"\n")
        yield from map(json.loads, lines)

    def _collect(self, number: int, job: Job, status: int) -> Outcome:
        path = self._answer_path(number)
        if not path.exists():
            return Answer(failure=_killed(status, self._log_tail())), None
        answer = Answer.model_validate_json(path.read_bytes())
        if answer.failure is not None:
            return answer, None
        if job.tape_path is None:
            return answer, None
        tape_path = Path(job.tape_path)
        tape = Tape.load(tape_path)
        tape_path.unlink()
        return answer, tape

    def _answer_path(self, number: int) -> Path:
        return self.workdir / f"answer-{number}.json"

    def _log_tail(self) -> tuple[str, ...]:
        return tuple(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _death(self) -> Exception:
        """The worker itself is gone: say what it said last."""
        tail = self._log_tail()
        missing = next((line for line in reversed(tail) if line.startswith("ModuleNotFoundError")), None)
        if missing is not None:
            return MachineError(
                "the estimator's worker cannot import what it needs",
                hint="install torch, deepspeed and transformers into this environment",
                because=(missing,),
            )
        return InternalError("the estimator's worker ended unexpectedly", because=tail)


def _cannot_start(error: OSError) -> MachineError:
    message = "the estimator's worker cannot be started"
    return MachineError(message, hint="free disk space or memory", because=(str(error),))


def _environment() -> dict[str, str]:
    """The worker's environment: no GPU is touched, nothing is fetched, DeepSpeed keeps quiet."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _killed(status: int, log: tuple[str, ...]) -> Failure:
    if status == -signal.SIGKILL:
        return Failure(
            code=MachineError.code,
            message="the estimate was killed: this machine ran out of memory",
            hint="pass --jobs 1, or run it on a machine with more memory",
        )
    return Failure(
        code=InternalError.code,
        message=f"the estimate's process ended with status {status} and no answer",
        hint="report it with the output below",
        because=log,
    )
