"""DeepSpeed's loops over all ranks, folded: the tape of rank 0 is the same, and 1024 ranks cost what one does.

Each row replaces code that makes a view for every other rank and then only ever joins them. What is allocated, freed
and communicated does not depend on how many views stood between. Without them (`Job.has_shortcuts`) DeepSpeed's own
code runs; tests compare both tapes.
"""

import math
import sys
from typing import Any

import torch

from dstune.estimator.gpu import GpuTraits
from dstune.estimator.patches import Patch

ALWAYS = "DeepSpeed makes no view for each rank"


def _range_of_one(_original: Any, _traits: GpuTraits) -> Any:
    """`range` for one module: the loop that cuts the gathered buffer makes rank 0's part only."""

    def fold(*bounds: int) -> range:
        if sys._getframe(1).f_code.co_name == "_all_gather_dtype":
            return range(1)
        return range(*bounds)

    return fold


def _wait(original: Any, _traits: GpuTraits) -> Any:
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - the virtual one is set by now
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # noqa: PLC0415

    def wait(self: Any, handle_dependency: bool = True) -> None:
        if self.complete or self.quantization:
            original(self, handle_dependency)
            return
        self.allgather_handle.wait()
        first = self.partitions[0]
        gathered = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
        for param in self.params:
            part = gathered.narrow(0, 0, param.ds_numel)
            param.data = torch.cat([part]).view(param.ds_shape).to(param.ds_tensor.dtype)
            param.ds_status = ZeroParamStatus.AVAILABLE
        self.complete = True
        if not get_accelerator().is_synchronized_device() and not handle_dependency:
            type(self).data_buffer.append([gathered])  # keeps the buffer until DeepSpeed lets go of it

    return wait


def _reduce_scatter(original: Any, _traits: GpuTraits) -> Any:
    import deepspeed.comm as dist  # noqa: PLC0415
    from deepspeed.runtime.comm import coalesced_collectives  # noqa: PLC0415

    def reduce_scatter(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
        num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if any(tensor.numel() % num_ranks for tensor in tensors):
            padded: list[torch.Tensor] = original(tensors, group)  # it allocates the padding
            return padded
        flat = tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
        flat.div_(num_ranks)
        size = math.ceil(flat.numel() / num_ranks)
        own = flat.narrow(0, rank * size, size)
        coalesced_collectives._torch_reduce_scatter_fn(flat, own, group=group)
        sizes = [tensor.numel() // num_ranks for tensor in tensors]
        return [own.narrow(0, sum(sizes[:number]), size) for number, size in enumerate(sizes)]

    return reduce_scatter


SHORTCUTS: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.zero.partition_parameters:range",
        "a gathered buffer is cut into a view for each rank (`Init._all_gather_dtype`), of which rank 0 uses its own",
        ALWAYS,
        _range_of_one,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:AllGatherCoalescedHandle.wait",
        "each parameter is joined from a view for each rank",
        ALWAYS,
        _wait,
    ),
    Patch(
        "deepspeed.runtime.zero.stage3:reduce_scatter_coalesced",
        "gradients are cut into a view for each rank and joined again",
        ALWAYS,
        _reduce_scatter,
    ),
)


def apply_shortcuts(traits: GpuTraits) -> None:
    """Change this process."""
    for shortcut in SHORTCUTS:
        shortcut.apply(traits)
