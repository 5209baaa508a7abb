"""A plan as the files of those who use DeepSpeed: itself, Transformers, Accelerate, Lightning."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dstune.dsconfig import varied_keys
from dstune.dsconfig.emitted import complete_config
from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing, Precision

AUTO = "auto"
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TUNED_IN_ZERO = ("stage", "offload_optimizer", "offload_param")


@dataclass(frozen=True, slots=True)
class Emission:
    """What is written for a plan.

    Attributes:
        files: Suffix that takes the place of the output's own -> content; "" is the output itself.
        usage: Lines to put into the training script.
    """

    files: Mapping[str, str]
    usage: tuple[str, ...] = ()


def emit(target: str, plan: TrainingPlan, base: dict[str, Any] | None, name: str) -> Emission:
    """The files for a target.

    Args:
        target: One of `TARGETS`.
        plan: What was tuned.
        base: The user's own ds_config, whose other keys and order are kept.
        name: The output's path without its suffix, as one file names the other.
    """
    config = complete_config(plan) if base is None else _merged(base, plan)
    return TARGETS[target](plan, config, name)


def _merged(base: dict[str, Any], plan: TrainingPlan) -> dict[str, Any]:
    """The user's file with what was tuned in its place."""
    made = complete_config(plan)
    config = dict(base)
    for key in SIZES:
        config[key] = made[key]
    zero = base.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, dict) else {}
    for key in (*TUNED_IN_ZERO, *varied_keys(plan)):
        if key in made["zero_optimization"]:
            value, old = made["zero_optimization"][key], zero.get(key)
            zero[key] = {**old, "device": value["device"]} if isinstance(old, dict) else value
        else:
            zero.pop(key, None)
    config["zero_optimization"] = zero
    for precision in (Precision.BF16, Precision.FP16):
        old = base.get(precision.value)
        if plan.precision is precision:
            config[precision.value] = {**(old if isinstance(old, dict) else {}), "enabled": True}
        elif isinstance(old, dict):
            config[precision.value] = {**old, "enabled": False}
    return config


def _dump(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"


def _deepspeed(plan: TrainingPlan, config: dict[str, Any], _name: str) -> Emission:
    return Emission({"": _dump(config)}, _checkpointing_line(plan))


def _transformers(plan: TrainingPlan, config: dict[str, Any], name: str) -> Emission:
    """`auto` where the Trainer fills in (transformers 5.17 integrations/deepspeed.py, trainer_config_process)."""
    config = {**config, **dict.fromkeys(SIZES, AUTO), "gradient_clipping": AUTO}
    if "optimizer" in config:
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
        config["optimizer"] = {**config["optimizer"], "params": {**config["optimizer"].get("params", {}), **params}}
    for precision in (Precision.BF16, Precision.FP16):
        if isinstance(config.get(precision.value), dict):
            config[precision.value] = {**config[precision.value], "enabled": AUTO}
    arguments = {
        "deepspeed": f"{name}.json",
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "bf16": plan.precision is Precision.BF16,
        "fp16": plan.precision is Precision.FP16,
        "gradient_checkpointing": plan.activation_checkpointing is not Checkpointing.OFF,
    }
    usage = ["TrainingArguments(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"]
    return Emission({"": _dump(config)}, tuple(usage))


def _accelerate(plan: TrainingPlan, config: dict[str, Any], name: str) -> Emission:
    """`accelerate launch --config_file`: the YAML has no place for all keys, so it names a ds_config beside it."""
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415 - no other command needs it

    config_file = f"{name}.ds_config.json"
    num_nodes = max(1, plan.world_size // plan.ranks_per_node)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": config_file,
            "zero3_init_flag": plan.zero_init,
        },
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": num_nodes,
        "num_processes": plan.world_size,
        "use_cpu": False,
    }
    text = yaml.safe_dump(content, sort_keys=False)
    usage = (f"accelerate launch --config_file {name}.yaml train.py", *_checkpointing_line(plan))
    return Emission({"": text, ".ds_config.json": _dump(config)}, usage)


def _lightning(plan: TrainingPlan, config: dict[str, Any], name: str) -> Emission:
    """Lightning refuses `gradient_accumulation_steps` in the file and computes the total batch.

    Source: lightning 2.6 `pytorch/strategies/deepspeed.py`, `_format_batch_size_and_grad_accum_config`.
    """
    left_out = {"train_batch_size", "gradient_accumulation_steps"}
    config = {key: value for key, value in config.items() if key not in left_out}
    precision = {Precision.BF16: "bf16-mixed", Precision.FP16: "16-mixed", Precision.FP32: "32-true"}[plan.precision]
    arguments = {
        "devices": plan.ranks_per_node,
        "num_nodes": max(1, plan.world_size // plan.ranks_per_node),
        "precision": precision,
        "accumulate_grad_batches": plan.gradient_accumulation_steps,
    }
    usage = [
        "Trainer(",
        f'    strategy=DeepSpeedStrategy(config="{name}.json"),',
        *(f"    {key}={value!r}," for key, value in arguments.items()),
        ")",
        f"DataLoader(..., batch_size={plan.micro_batch})",
    ]
    return Emission({"": _dump(config)}, (*usage, *_checkpointing_line(plan)))


def _checkpointing_line(plan: TrainingPlan) -> tuple[str, ...]:
    if plan.activation_checkpointing is Checkpointing.OFF:
        return ()
    return ("model.gradient_checkpointing_enable()",)


TARGETS: dict[str, Callable[[TrainingPlan, dict[str, Any], str], Emission]] = {
    "deepspeed": _deepspeed,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "lightning": _lightning,
}
"""What `--for` can name."""
