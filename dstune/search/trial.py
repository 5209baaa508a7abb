"""`Trial`: one setting tried for real, and how it ended. The border between search and children, so pydantic."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from dstune.model import ModelSpec
from dstune.plan import TrainingPlan

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Outcome(StrEnum):
    """How a trial ended."""

    OK = "ok"
    OOM = "oom"
    """Memory ran out, on the GPU or on the host; `Ending.detail` says which."""
    INVALID = "invalid-config"
    """DeepSpeed refused the configuration."""
    CRASH = "crash"
    HANG = "hang"
    """It did not end before its deadline."""
    INTERRUPTED = "interrupted"


class Accelerator(StrEnum):
    """What a trial runs on."""

    CUDA = "cuda"
    CPU = "cpu"


class JobOrder(BaseModel):
    """What a trial's processes are told."""

    model_config = _FROZEN

    plan: TrainingPlan
    model: ModelSpec
    accelerator: Accelerator
    num_processes: int
    """Real processes; less than the plan's world size if that is emulated."""
    memory_cap_bytes: int | None = None
    """What torch's allocator may take of each GPU."""
    warmup_steps: int = 2
    """Whole steps that are not timed: kernels are compiled and optimizer states made."""
    min_steps: int = 3
    """Whole steps that are timed, at least."""
    min_timed_s: float = 2.0
    """Steps are timed until this has passed ..."""
    max_steps: int = 20
    """... or so many are done."""


class Measurement(BaseModel):
    """What rank 0 measured."""

    model_config = _FROZEN

    step_s: float
    """Median of whole steps, accumulation included."""
    spread: float
    """(slowest - fastest) / median."""
    num_steps: int
    """Steps that were timed."""
    micro_step_s: float
    """One forward and backward, in a step of its own in which the device is waited for each time."""
    optimizer_step_s: float
    """The optimizer's step in it."""
    peak_allocated_bytes: int | None = None
    """Of the GPU, all ranks' largest; None without a GPU."""
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """What the driver counts on rank 0's GPU, context and NCCL included."""
    host_rss_bytes: int = 0
    """Of rank 0's process."""


class Ending(BaseModel):
    """How a trial ended, and what says so."""

    model_config = _FROZEN

    outcome: Outcome
    detail: str = ""
    """One line: which memory ran out, which exception."""
    rank: int | None = None
    """Whose fault it was."""
    log_lines: tuple[str, ...] = ()
    """The lines of that rank's log that say so."""


class Trial(BaseModel):
    """One finished trial."""

    model_config = _FROZEN

    number: int
    plan: TrainingPlan
    ending: Ending
    measurement: Measurement | None = None
    """Set if it ended well."""
    wall_s: float
    predicted_bytes: int | None = None
    """Peak that torch was expected to reserve on a GPU."""
    log_folder: str = ""
    """Where each rank's log lies."""
    has_communication: bool = True
    """False if other ranks were emulated: throughput is then without communication."""

    @property
    def samples_per_s(self) -> float:
        """Sequences a second, all ranks together; 0 if it did not end well."""
        if self.measurement is None:
            return 0.0
        return self.plan.global_batch / self.measurement.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, all ranks together."""
        return self.samples_per_s * self.plan.seq_len
