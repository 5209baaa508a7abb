"""A plan as the file that DeepSpeed reads, and where it came from: the same bytes for the same plan."""

import json
from typing import Any

from dstune import __version__
from dstune.dsconfig import ds_config_for
from dstune.plan import TrainingPlan


def config_text(plan: TrainingPlan) -> str:
    """Strict JSON, keys in the order of DeepSpeed's documentation, two spaces, a final newline."""
    return json.dumps(complete_config(plan), indent=2) + "\n"


def complete_config(plan: TrainingPlan) -> dict[str, Any]:
    """The plan's ds_config with all three batch sizes, which DeepSpeed then checks against each other."""
    config = ds_config_for(plan)
    sizes = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }
    return {**sizes, **{key: value for key, value in config.items() if key not in sizes}}


def provenance_text(plan: TrainingPlan, command: str, details: dict[str, Any]) -> str:
    """The sidecar: what made the file, and the plan it is for."""
    content = {
        "made_by": f"dstune {__version__} {command}",
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "plan_digest": plan.digest(),
        **details,
    }
    return json.dumps(content, indent=2) + "\n"
