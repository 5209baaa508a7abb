"""GPU memory outside torch's allocator: CUDA context, loaded kernels, NCCL. An assumption, and said to be one."""

from dataclasses import dataclass

from dstune.units import MIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """One row of the table."""

    size_bytes: int
    what: str
    source: str


NCCL_ONE_GROUP = Overhead(
    1_391_263_744,
    "CUDA context, loaded kernels and NCCL, one communicator",
    "recorded on an H200, torch 2.11+cu130, NCCL group of one (row `solo-gpt2-nccl`: device_used - reserved_now)",
)
SINGLE_GPU = Overhead(
    800 * MIB,
    "CUDA context and loaded kernels",
    "assumption: the figure above less NCCL's buffers",
)


def overhead(world_size: int) -> Overhead:
    """What a rank takes outside the allocator."""
    return NCCL_ONE_GROUP if world_size > 1 else SINGLE_GPU
