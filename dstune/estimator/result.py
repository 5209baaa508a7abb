"""`Estimate`: what is said of one plan. The border of the estimator, so pydantic, frozen."""

from pydantic import BaseModel, ConfigDict, computed_field

from dstune.plan import TrainingPlan
from dstune.vocab import Verdict

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Phase(BaseModel):
    """Memory at the end of one phase, and its peaks in it."""

    model_config = _FROZEN

    name: str
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int


class Shortage(BaseModel):
    """The allocation that fails on this GPU."""

    model_config = _FROZEN

    segment_bytes: int
    """What torch's message will say it tried to allocate."""
    operation: str
    module: str
    phase: str


class GpuEstimate(BaseModel):
    """The GPU's side."""

    model_config = _FROZEN

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_range_bytes: tuple[int, int]
    """Least and most when the tape is replayed with small changes."""
    min_capacity_bytes: int
    """The smallest amount for torch's allocator on which the steps still run; overhead not included."""
    min_capacity_range_bytes: tuple[int, int]
    """Least and most when the tape is replayed with small changes."""
    overhead_bytes: int
    """Outside torch's allocator: CUDA context, NCCL. An assumption."""
    capacity_bytes: int
    """What the GPU has."""
    verdict: Verdict
    """Where capacity_bytes less overhead_bytes lies in min_capacity_range_bytes."""
    peak_phase: str
    """Where most is allocated."""
    phases: tuple[Phase, ...]
    shortage: Shortage | None
    """Set if the smallest capacity is more than there is."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fits(self) -> bool:
        """Whether the verdict is `fits`."""
        return self.verdict is Verdict.FITS

    @property
    def needed_bytes(self) -> int:
        """What the GPU must have."""
        return self.min_capacity_bytes + self.overhead_bytes

    @property
    def sure_bytes(self) -> int:
        """What it must have to be sure."""
        return self.min_capacity_range_bytes[1] + self.overhead_bytes


class HostEstimate(BaseModel):
    """The host's side, for one process except where said."""

    model_config = _FROZEN

    pinned_bytes: int
    pageable_bytes: int
    by_owner_bytes: dict[str, int]
    """Both at the worst moment, by who holds it."""
    disk_bytes: int
    """What NVMe offload keeps on disk."""
    per_node_bytes: int
    """Memory of all processes of a node."""
    capacity_bytes: int | None
    """Memory of a node, if known."""
    fits: bool | None
    """None if the node's memory is not known."""


class Estimate(BaseModel):
    """What one plan needs."""

    model_config = _FROZEN

    plan: TrainingPlan
    gpu: GpuEstimate
    host: HostEstimate
    largest_micro_batch: int | None = None
    """The largest micro-batch that fits on the GPU, if it was looked for; the plan then has it, or 1 if it is 0."""
    num_parameters: int
    optimizer: str
    """DeepSpeed's optimizer and the one it wraps."""
    num_ops: int
    seconds: float
    """Wall time of the run."""
    notes: tuple[str, ...] = ()
    """What the reader must know about these numbers."""

    @property
    def fits(self) -> bool:
        """Whether GPU and, where known, host have room."""
        return self.gpu.fits and self.host.fits is not False


class Refusal(BaseModel):
    """A plan that cannot be run, and why."""

    model_config = _FROZEN

    plan: TrainingPlan
    code: str
    message: str
    hint: str | None
    because: tuple[str, ...]
    traceback: str = ""
