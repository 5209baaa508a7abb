"""The rows of the default table: every combination that DeepSpeed allows."""

from collections.abc import Sequence

from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing, Offload, Precision, allowed_offloads


def grid(
    base: TrainingPlan,
    stages: Sequence[int],
    offloads: Sequence[Offload],
    precisions: Sequence[Precision],
    checkpointings: Sequence[Checkpointing],
    *,
    zero_init: bool,
) -> list[TrainingPlan]:
    """Plans for each combination, grouped by precision so that stages can be compared line by line.

    Args:
        base: All that does not vary.
        stages: ZeRO stages.
        offloads: Those that a stage does not allow are left out.
        precisions: What is trained in.
        checkpointings: With or without recomputation.
        zero_init: Whether ZeRO 3 builds the model under `deepspeed.zero.Init`, as Hugging Face's Trainer does.
    """
    return [
        base.model_copy(
            update={
                "zero_stage": stage,
                "offload": offload,
                "precision": precision,
                "activation_checkpointing": checkpointing,
                "zero_init": zero_init and stage == 3,
            }
        )
        for precision in precisions
        for checkpointing in checkpointings
        for stage in stages
        for offload in allowed_offloads(stage)
        if offload in offloads
    ]
