"""The machines a plan runs on: GPU, node, cluster, as plain values."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Cluster", "Gpu"]

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Gpu(BaseModel):
    """One GPU model."""

    model_config = _FROZEN

    name: str
    """Its name in the catalogue, or what the driver calls it."""
    capacity_bytes: int = Field(gt=0)
    """What a process can see of its memory."""
    compute_capability: tuple[int, int]
    """Decides which kernels the libraries choose."""
    num_multiprocessors: int = Field(gt=0)
    """Decides how reductions are split."""
    source: str
    """Where these figures come from."""


class Cluster(BaseModel):
    """All nodes alike."""

    model_config = _FROZEN

    gpu: Gpu
    num_nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    host_bytes: int | None
    """Memory of a node, or None if nobody said."""

    @property
    def world_size(self) -> int:
        """GPUs, all nodes together."""
        return self.num_nodes * self.gpus_per_node
