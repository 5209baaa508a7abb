"""A ds_config file: read as DeepSpeed reads it, with the place of every fault."""

from pathlib import Path
from typing import Any

import hjson

from dstune.errors import ConfigFileError, UsageError
from dstune.plan import TrainingPlan
from dstune.vocab import ClientOptimizer, Offload, Precision

AUTO = "auto"
"""What Hugging Face's Trainer replaces; DeepSpeed itself cannot read it."""


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read a file with hjson, the parser that DeepSpeed uses (`deepspeed/runtime/config.py`).

    Raises:
        ConfigFileError: It cannot be read, is no object, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"`{path}` cannot be read", because=(str(error),)) from error
    try:
        config = hjson.loads(text, object_pairs_hook=_unique)
    except hjson.HjsonDecodeError as error:
        raise ConfigFileError(
            f"{path}:{error.lineno}:{error.colno}: {error.msg[0].lower()}{error.msg[1:]}",
            hint="mend the JSON at that place",
        ) from error
    except _DuplicateKeyError as error:
        line = text[: text.rfind(f'"{error.key}"')].count("\n") + 1
        raise ConfigFileError(f"{path}:{line}: `{error.key}` is given twice", hint="keep one of them") from error
    except RecursionError:
        raise ConfigFileError(f"{path}:1: nested too deeply to be a configuration") from None
    if not isinstance(config, dict):
        raise ConfigFileError(f"{path}:1: no object", hint="a ds_config begins with {")
    return config


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _DuplicateKeyError(key)
        made[key] = value
    return made


def without_auto(config: dict[str, Any], plan: TrainingPlan, hidden_size: int) -> dict[str, Any]:
    """Replace `auto` as Hugging Face's Trainer would.

    Source: transformers 5.17 `integrations/deepspeed.py` (`trainer_config_process`, `trainer_config_finalize`): batch
    sizes from the arguments, bucket sizes from the hidden size, precision from the arguments.
    """
    known = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "train_batch_size": plan.global_batch,
        "gradient_clipping": 1.0,
        "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
        "bf16.enabled": plan.precision is Precision.BF16,
        "fp16.enabled": plan.precision is Precision.FP16,
    }
    return _replace(config, known, "")


def _replace(config: dict[str, Any], known: dict[str, Any], path: str) -> dict[str, Any]:
    """Known places get their value; an unknown `auto` is left out, so that DeepSpeed's default holds."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        place = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            made[key] = _replace(value, known, place)
        elif value != AUTO:
            made[key] = value
        elif place in known:
            made[key] = known[place]
    return made


def plan_of(config: dict[str, Any], plan: TrainingPlan) -> TrainingPlan:
    """The plan that a ds_config describes: its keys where it has them, else the given plan's.

    Raises:
        UsageError: Batch sizes that do not go into each other.
    """
    zero = config.get("zero_optimization") or {}
    zero = zero if isinstance(zero, dict) else {}
    accumulation = _number(config, "gradient_accumulation_steps") or plan.gradient_accumulation_steps
    shared = _number(config, "sequence_parallel_size") or plan.sequence_parallel_size
    num_groups = max(1, plan.world_size // shared)
    micro = _number(config, "train_micro_batch_size_per_gpu")
    total = _number(config, "train_batch_size")
    if micro is None and total is not None:
        micro, rest = divmod(total, accumulation * num_groups)
        if rest or micro < 1:
            raise UsageError(
                f"train_batch_size {total} does not divide by accumulation {accumulation} x {num_groups} "
                + ("GPUs" if shared == 1 else f"groups of {shared} GPUs"),
                hint="give train_micro_batch_size_per_gpu, or another number of --gpus",
            )
    stage = zero.get("stage", 0)
    try:
        return plan.model_copy(
            update={
                "zero_stage": int(stage),
                "offload": _offload(zero),
                "precision": _precision(config),
                "micro_batch": micro or plan.micro_batch,
                "gradient_accumulation_steps": accumulation,
                "sequence_parallel_size": shared,
                "optimizer": str((config.get("optimizer") or {}).get("type", plan.optimizer)),
                **_optimizer_of(config, plan),
            }
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"zero_optimization.stage `{stage}` is no stage", hint="write 0, 1, 2 or 3") from error


def _optimizer_of(config: dict[str, Any], plan: TrainingPlan) -> dict[str, Any]:
    """What stands in for a trainer's optimizer where the file names none: torch's AdamW, or DeepSpeed's on the host.

    Source: transformers 5.17 `integrations/deepspeed.py`, deepspeed_optim_sched; accelerate 1.16 `accelerator.py`,
    `_prepare_deepspeed`, which exchanges a torch optimizer for DeepSpeedCPUAdam under offload.
    """
    if "optimizer" in config or plan.client_optimizer is not None:
        return {"ds_config": config}
    if _offload(config.get("zero_optimization") or {}) is Offload.NONE:
        return {"ds_config": config, "client_optimizer": ClientOptimizer.ADAMW}
    return {"ds_config": {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}}


def _number(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{key} `{value}` is impossible", hint="write a number of at least 1")
    return value


def _offload(zero: dict[str, Any]) -> Offload:
    def on(key: str) -> bool:
        block = zero.get(key)
        return isinstance(block, dict) and block.get("device", "cpu") != "none"

    if on("offload_param") and zero.get("stage") == 3:
        return Offload.OPTIMIZER_PARAM
    return Offload.OPTIMIZER if on("offload_optimizer") else Offload.NONE


def _precision(config: dict[str, Any]) -> Precision:
    for precision in (Precision.BF16, Precision.FP16):
        block = config.get(precision.value)
        if isinstance(block, dict) and block.get("enabled"):
            return precision
    return Precision.FP32


def vary(config: dict[str, Any], plan: TrainingPlan) -> TrainingPlan:
    """A plan of the table that keeps every other key of the file."""
    zero = {
        key: value
        for key, value in (config.get("zero_optimization") or {}).items()
        if key not in {"stage", "offload_optimizer", "offload_param"}
    }
    zero["stage"] = plan.zero_stage
    if plan.offload is not Offload.NONE:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload is Offload.OPTIMIZER_PARAM:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    varied = {key: value for key, value in config.items() if key not in {"bf16", "fp16", "train_batch_size"}}
    varied["zero_optimization"] = zero
    varied["train_micro_batch_size_per_gpu"] = plan.micro_batch
    varied["gradient_accumulation_steps"] = plan.gradient_accumulation_steps
    if plan.precision is not Precision.FP32:
        same = config.get(plan.precision.value)
        varied[plan.precision.value] = {**(same if isinstance(same, dict) else {}), "enabled": True}
    return plan.model_copy(update=_optimizer_of(varied, plan))
