"""What crosses the border between the front process and a worker: a job in, an answer out. No torch."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from dstune.cluster import Cluster
from dstune.estimator.result import GpuEstimate, HostEstimate
from dstune.model import ModelSpec
from dstune.plan import TrainingPlan
from dstune.vocab import Routing

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Job(BaseModel):
    """One plan to run on the virtual GPU."""

    model_config = _FROZEN

    plan: TrainingPlan
    """How to train."""
    model: ModelSpec
    """What to train."""
    compute_capability: tuple[int, int]
    """Of the GPU that is pretended."""
    num_multiprocessors: int = 108
    """Of the GPU that is pretended."""
    capacity_bytes: int
    """Its memory, for code that asks; the tape does not depend on it."""
    tape_path: str | None = None
    """Where the tape goes, if it is wanted."""
    cluster: Cluster | None = None
    """What the tape is to be assessed against, if it is."""
    num_steps: int = 2
    """Optimizer steps; the second is the first with optimizer states in place from its start."""
    history: tuple[int, ...] | None = None
    """Micro-batches that one engine tries in turn, two steps each, instead of the plan's."""
    has_shortcuts: bool = True
    """Whether operations seen before and loops over all ranks are shortened; the tape is the same."""
    routing: Routing = Routing.BALANCED
    """Where tokens go in a mixture of experts."""

    @classmethod
    def on(cls, cluster: Cluster, plan: TrainingPlan, model: ModelSpec, **rest: Any) -> Self:
        """A plan to run on a cluster's GPU and to assess against the cluster."""
        gpu = cluster.gpu
        return cls(
            plan=plan,
            model=model,
            cluster=cluster,
            compute_capability=gpu.compute_capability,
            num_multiprocessors=gpu.num_multiprocessors,
            capacity_bytes=gpu.capacity_bytes,
            **rest,
        )


class Failure(BaseModel):
    """Why a job has no tape."""

    model_config = _FROZEN

    code: str
    """Code of a `DstuneError`."""
    message: str
    hint: str | None = None
    because: tuple[str, ...] = ()
    traceback: str = ""
    """For `--debug`."""


class Answer(BaseModel):
    """What a worker says of a job."""

    model_config = _FROZEN

    failure: Failure | None = None
    """Set if there is no tape."""
    num_parameters: int = 0
    """All ranks together."""
    num_trainable: int = 0
    """Of them, those that get gradients."""
    optimizer: str = ""
    """Class of DeepSpeed's optimizer and of the one it wraps."""
    num_ops: int = 0
    """Operations run."""
    disk_bytes: int = 0
    """Written to NVMe and kept there."""
    seconds: float = 0.0
    """Wall time of the run, imports excluded."""
    cpu_s: float = 0.0
    """Processor time of the fork."""
    peak_rss_bytes: int = 0
    """Most memory the fork itself held."""
    gpu: GpuEstimate | None = None
    """Set if the job names a cluster."""
    host: HostEstimate | None = None
    """The same."""
    notes: tuple[str, ...] = ()
    """What the reader should know about the number."""
