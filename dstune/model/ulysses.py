"""Ulysses sequence parallelism: ranks that share each sequence, as DeepSpeed has it for transformers' models."""

from typing import Any

import torch

from dstune.errors import ModelError
from dstune.plan import TrainingPlan

IGNORED_LABEL = -100
"""A label that transformers counts for nothing (`loss/loss_utils.py`, `ignore_index`)."""


def register(module: Any, plan: TrainingPlan) -> Any:
    """Put DeepSpeed's exchange of heads and tokens around the model's attention, in every process of the job.

    Returns:
        The process groups that `deepspeed.initialize` takes as `mpu`; None if no sequence is shared.

    Raises:
        ModelError: DeepSpeed cannot do it for this model.
    """
    if plan.sequence_parallel_size == 1:
        return None
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        msg = "sequence parallelism needs a transformers model: DeepSpeed replaces the attention that it registers"
        raise ModelError(msg, hint="leave --sequence-parallel out")
    import deepspeed  # noqa: PLC0415
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # noqa: PLC0415 - brings einops

    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    try:
        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=module,
            core_attn_implementation=config._attn_implementation,
            sequence_parallel_size=plan.sequence_parallel_size,
            micro_batch_size=plan.micro_batch,
        )
    except (ValueError, AttributeError) as error:
        msg = f"DeepSpeed cannot share the sequences of `{type(module).__name__}` among ranks"
        raise ModelError(
            msg, hint="leave --sequence-parallel out, or choose a size that divides the heads", because=(str(error),)
        ) from error


def shard(batch: Any, micro_batch: int) -> dict[str, Any]:
    """From a batch of a part's length, what this rank gets of a longer sequence; the groups must be there.

    Labels are shifted before the sequence is cut, and positions say where in it a part lies. There is no mask: none
    reaches the attention. Source: deepspeed 0.19.8 `runtime/sequence_parallel/ulysses_sp.py`,
    UlyssesSPDataLoaderAdapter; transformers 5.17 `integrations/deepspeed.py`, deepspeed_sp_compute_loss.

    Raises:
        ModelError: The model reads no text, or has one label a sequence.
    """
    from deepspeed.utils import groups  # noqa: PLC0415 - not before the accelerator is chosen

    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if ids is None or batch["labels"].shape != ids.shape:
        msg = "sequence parallelism needs a language model: token ids, and a label for each"
        raise ModelError(msg, hint="leave --sequence-parallel out")
    start = groups._get_sequence_parallel_rank() * ids.shape[1]
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(micro_batch, -1).contiguous()
    labels = torch.zeros_like(ids)
    return {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "labels": labels}


def loss_of_sequence(loss: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The loss over whole sequences, from each rank's own, weighted by tokens that count.

    Source: transformers 5.17 `integrations/deepspeed.py`, deepspeed_sp_compute_loss, whose allocations these are.
    """
    import torch.distributed.nn.functional as collective  # noqa: PLC0415
    from deepspeed.utils import groups  # noqa: PLC0415

    group = groups._get_sequence_parallel_group()
    losses = collective.all_gather(loss, group=group)
    counted = (batch["shift_labels"] != IGNORED_LABEL).view(-1).sum()
    counts = torch.stack(collective.all_gather(counted, group=group))
    stacked = torch.stack(losses)
    present = torch.where(counts > 0, stacked, torch.zeros_like(stacked))
    return (present * counts).sum() / counts.sum().clamp(min=1)
