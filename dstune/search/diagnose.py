"""Why a trial ended: a table of what libraries say when memory runs out or a configuration is refused."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dstune.search.trial import Ending, Outcome

LOG_TAIL_LINES = 15
"""Lines of a log that a failure shows."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that a log may say.

    Attributes:
        pattern: Found in a line.
        outcome: What it means.
        detail: In words.
        source: Where the message is made.
    """

    pattern: re.Pattern[str]
    outcome: Outcome
    detail: str
    source: str


def _sign(pattern: str, outcome: Outcome, detail: str, source: str) -> Sign:
    return Sign(re.compile(pattern), outcome, detail, source)


KILLED = "a process was killed (signal 9), by someone or for want of host memory"
VANISHED = "the rank vanished without an error: killed, by someone or for want of host memory"
"""The launcher saw only the ranks that lost it: DeepSpeed's looks once a second, in the order of ranks."""

SIGNS = (
    _sign(r"CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)", Outcome.OOM,
          "cuDNN could not allocate GPU memory", "cudnn status codes, as torch's ATen/cudnn/Exceptions.h prints them"),
    _sign(r"CUBLAS_STATUS_ALLOC_FAILED", Outcome.OOM,
          "cuBLAS could not allocate GPU memory", "torch ATen/cuda/Exceptions.cpp, blas::_cublasGetErrorEnum"),
    _sign(r"(ncclUnhandledCudaError|NCCL).*out of memory|Failed to CUDA (calloc|malloc)|Cuda failure.*out of memory",
          Outcome.OOM, "NCCL could not allocate GPU memory", "NCCL src/include/alloc.h, CUDACHECK's warning"),
    _sign(r"(cudaHostAlloc|cudaHostRegister|pin_memory|CachingHostAllocator).*out of memory|"
          r"out of memory.*(cudaHostAlloc|pin_memory)", Outcome.OOM,
          "page-locked host memory ran out", "torch ATen/cuda/CachingHostAllocator.cpp"),
    _sign(r"CUDA out of memory\. Tried to allocate|OutOfMemoryError", Outcome.OOM,
          "GPU memory ran out", "torch c10/cuda/CUDACachingAllocator.cpp"),
    _sign(r"CUDA error: out of memory", Outcome.OOM,
          "the driver had no memory left, on the GPU or page-locked on the host",
          "CUDA runtime, cudaErrorMemoryAllocation"),
    _sign(r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|^MemoryError|std::bad_alloc", Outcome.OOM,
          "host memory ran out", "torch c10/core/impl/alloc_cpu.cpp; errno ENOMEM"),
    _sign(r"EADDRINUSE|[Aa]ddress already in use", Outcome.CRASH, "the port was taken", "errno EADDRINUSE"),
    _sign(r"No space left on device", Outcome.CRASH, "the disk is full", "errno ENOSPC"),
    _sign(r"DeepSpeedConfigError|pydantic_core.*ValidationError|ZeRO.*(not supported|is not compatible)",
          Outcome.INVALID, "DeepSpeed refused the configuration", "deepspeed runtime/config.py"),
)  # fmt: skip
"""First match wins; a rank's last lines are searched first."""
LAUNCHER_SIGNS = (
    _sign(r"oom[_-]kill", Outcome.OOM, "host memory ran out: the kernel killed a process",
          "slurm src/plugins/task/cgroup, task_cgroup_memory_check_oom"),
    _sign(r"Signal 9 \(SIGKILL\)|return code = -9\b", Outcome.CRASH, KILLED,
          "torch distributed/elastic/multiprocessing/errors, ProcessFailure; deepspeed launcher/launch.py"),
    _sign(r"Signal 11 \(SIGSEGV\)|return code = -11\b", Outcome.CRASH, "a segmentation fault (signal 11)",
          "the same"),
    _sign(r"Signal 6 \(SIGABRT\)|return code = -6\b", Outcome.CRASH, "a process aborted (signal 6)", "the same"),
)  # fmt: skip
"""What a launcher says of a rank that could not speak for itself."""
BEREFT = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|remote worker crashing|Broken pipe|timed out)"
    r"|ncclRemoteError|remote process exited|connection was (closed|reset)",
    re.IGNORECASE,
)
"""What a rank says that only lost another one: gloo `transport/tcp/pair.cc`, NCCL `nccl.h` (ncclRemoteError)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is left of a trial.

    Attributes:
        statuses: Exit status of each process that was started; negative for a signal.
        logs: Of each rank, its last lines.
        refused: Ranks that say DeepSpeed refused the configuration.
        timed_out: Whether the deadline passed.
        kernel_killed: Whether the kernel counts a process killed for memory since the trial began.
        locks: Build locks that were there before the trial and still are.
        launcher: The launcher's own last lines.
    """

    statuses: Sequence[int]
    logs: Mapping[int, Sequence[str]]
    refused: frozenset[int] = frozenset()
    timed_out: bool = False
    kernel_killed: bool = False
    locks: Sequence[str] = ()
    launcher: Sequence[str] = ()


def is_bereft(text: str) -> bool:
    """Whether this is what a rank says that only lost another one, wherever DeepSpeed happened to be."""
    return BEREFT.search(text) is not None


def diagnose(evidence: Evidence) -> Ending:
    """Name the ending of a trial that left no measurement. The first rank whose log says why is the one shown."""
    for rank, lines in sorted(evidence.logs.items()):
        if said := _find(SIGNS, lines, rank):
            return said
    if evidence.refused:
        first = min(evidence.refused)
        refusal = "DeepSpeed refused the configuration"
        return Ending(outcome=Outcome.INVALID, detail=refusal, rank=first, log_lines=_lines_of(evidence, first))
    if evidence.kernel_killed:
        return Ending(outcome=Outcome.OOM, detail="host memory ran out: the kernel killed a process")
    failed = [rank for rank, lines in sorted(evidence.logs.items()) if _fell_by_itself(lines)]
    if evidence.timed_out:
        shown = next(iter(failed or sorted(evidence.logs)), None)
        late = "not done before its deadline"
        if evidence.locks:
            late += f"; if nothing is being compiled now, delete {evidence.locks[0]}"
        return Ending(outcome=Outcome.HANG, detail=late, rank=shown, log_lines=_lines_of(evidence, shown))
    if not failed and (said := _find(LAUNCHER_SIGNS, evidence.launcher, None)):
        return said
    shown = next(iter(failed), None)
    if shown is None and _signal(evidence) is None and (lost := _lost(evidence.logs)) is not None:
        return Ending(outcome=Outcome.CRASH, detail=VANISHED, rank=lost, log_lines=_lines_of(evidence, lost))
    lines = _lines_of(evidence, shown)
    return Ending(outcome=Outcome.CRASH, detail=_last_words(evidence, lines), rank=shown, log_lines=lines)


def _find(signs: Sequence[Sign], lines: Sequence[str], rank: int | None) -> Ending | None:
    for line in reversed(lines):
        for sign in signs:
            if sign.pattern.search(line):
                return Ending(outcome=sign.outcome, detail=sign.detail, rank=rank, log_lines=_around(lines, line))
    return None


def _lines_of(evidence: Evidence, rank: int | None) -> tuple[str, ...]:
    return () if rank is None else _tail(evidence.logs[rank])


def _last_words(evidence: Evidence, lines: Sequence[str]) -> str:
    if lines:
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]
    number = _signal(evidence)
    if number == signal.SIGKILL:
        return KILLED
    return f"signal {number}" if number else f"exit status {next((s for s in evidence.statuses if s), 0)}"


def _signal(evidence: Evidence) -> int | None:
    """What ended a process. Not SIGTERM if there is another: that is how the rest is asked to end."""
    signals = [-status for status in evidence.statuses if status < 0]
    return next((number for number in signals if number != signal.SIGTERM), next(iter(signals), None))


def _lost(logs: Mapping[int, Sequence[str]]) -> int | None:
    """The rank without an exception of its own, if another one says that it lost a rank."""
    silent = [rank for rank, lines in sorted(logs.items()) if _exception_in(lines) is None]
    is_missed = any(is_bereft(line) for lines in logs.values() for line in _exception_in(lines) or ())
    return silent[0] if len(silent) == 1 and is_missed else None


def _fell_by_itself(lines: Sequence[str]) -> bool:
    """Whether a rank's log ends in an exception that is not the loss of another rank."""
    exception = _exception_in(lines)
    return exception is not None and not any(map(is_bereft, exception))


def _exception_in(lines: Sequence[str]) -> Sequence[str] | None:
    """A log from its first exception on."""
    start = next((n for n, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    return None if start is None else lines[start:]


def _around(lines: Sequence[str], line: str) -> tuple[str, ...]:
    end = list(lines).index(line) + 1
    return _tail(lines[:end])


def _tail(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in lines if line.strip())[-LOG_TAIL_LINES:]
