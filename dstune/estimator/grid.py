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
) -> list[TrainingPlan]:
    """Plans for each combination, grouped by precision so that stages can be compared line by line."""
    return [
        base.model_copy(
            update={
                "zero_stage": stage,
                "offload": offload,
                "precision": precision,
                "activation_checkpointing": checkpointing,
            }
        )
        for precision in precisions
        for checkpointing in checkpointings
        for stage in stages
        for offload in allowed_offloads(stage)
        if offload in offloads
    ]
