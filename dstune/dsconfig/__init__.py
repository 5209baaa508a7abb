"""From a plan to the ds_config that DeepSpeed gets, and back as far as a plan can say it."""

from typing import Any

from dstune.plan import TrainingPlan
from dstune.vocab import Offload, Precision


def ds_config_for(plan: TrainingPlan) -> dict[str, Any]:
    """The whole ds_config of a plan: its own, if it brings one, else one made of its fields."""
    config = _own_config(plan) if plan.ds_config is None else dict(plan.ds_config)
    if plan.sequence_parallel_size > 1:  # zero.Init counts the ranks by it, before there are groups
        config.setdefault("sequence_parallel_size", plan.sequence_parallel_size)
    return config


def _own_config(plan: TrainingPlan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": _zero(plan),
    }
    if plan.client_optimizer is None:
        config["optimizer"] = {"type": plan.optimizer, "params": {"lr": 1e-5}}
    elif plan.zero_stage and not plan.client_optimizer.is_tested:
        config["zero_allow_untested_optimizer"] = True  # without it DeepSpeed refuses
    if plan.precision is not Precision.FP32:
        config[plan.precision.value] = {"enabled": True}
    return config


def with_micro_batch(plan: TrainingPlan, micro_batch: int) -> TrainingPlan:
    """The same plan with another micro-batch, in its own ds_config too if it brings one."""
    return with_batch(plan, micro_batch, plan.gradient_accumulation_steps)


def with_batch(plan: TrainingPlan, micro_batch: int, accumulation: int) -> TrainingPlan:
    """The same plan with another micro-batch and accumulation, in its own ds_config too if it brings one."""
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    config = plan.ds_config
    if config is not None:
        config = {**{name: value for name, value in config.items() if name != "train_batch_size"}, **sizes}
    changes = {"micro_batch": micro_batch, "gradient_accumulation_steps": accumulation, "ds_config": config}
    return plan.model_copy(update=changes)


def with_zero_key(plan: TrainingPlan, key: str, value: object) -> TrainingPlan:
    """The same plan with one key of `zero_optimization` set."""
    config = ds_config_for(plan)
    zero = {**config.get("zero_optimization", {}), key: value}
    return plan.model_copy(update={"ds_config": {**config, "zero_optimization": zero}})


def varied_keys(plan: TrainingPlan) -> dict[str, Any]:
    """What a plan's own ds_config says in `zero_optimization` beyond its fields; nothing if it brings none."""
    if plan.ds_config is None:
        return {}
    zero = plan.ds_config.get("zero_optimization", {})
    return {key: value for key, value in zero.items() if key not in _zero(plan)}


def _zero(plan: TrainingPlan) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.offload in {Offload.OPTIMIZER, Offload.OPTIMIZER_PARAM}:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload is Offload.OPTIMIZER_PARAM:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero
