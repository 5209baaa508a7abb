"""Ask the installed DeepSpeed which keys it knows: python -m tests.lint.harvest --write.

Top-level keys are those for which its parser asks (and `sequence_parallel_size`, read where ranks are many); those of a
block come from its pydantic model, or are asked for too.
"""

import json
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "dstune" / "lint" / "known_keys.json"
BLOCKS = (
    "activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast",
)  # fmt: skip
"""Blocks that DeepSpeed reads without a model of them."""
OPEN = {
    "optimizer.params": "arguments of the optimizer's class",
    "scheduler.params": "arguments of the scheduler's class",
    "autotuning": "read by the autotuner only",
    "data_efficiency": "its keys depend on the curriculum",
    "pipeline": "handed on as it is",
    "expert_parallel": "read by AutoEP only",
    "weight_quantization": "for inference",
    "zero_optimization.zenflow": "its own parser",
    "tensor_parallel": "its own parser",
    "timers": "its own parser",
    "datastates_ckpt": "its own parser",
    "checkpoint": "its engine takes more",
    "compile": "keys come and go",
}  # fmt: skip
"""Blocks whose keys are not checked, and why."""


class Asked(dict[str, Any]):
    """A dictionary that remembers what it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return _AskedKeys(self)

    def __copy__(self) -> "Asked":
        return self


class _AskedKeys:
    def __init__(self, owner: Asked) -> None:
        self._owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(list(dict.keys(self._owner)))


def harvest() -> dict[str, Any]:
    """The table."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked = Asked({"train_batch_size": 1, "optimizer": Asked({"type": "Adam", "params": {}})})
    asked["scheduler"] = Asked({"type": "WarmupLR", "params": {}})
    for name in BLOCKS:
        asked[name] = Asked({"enabled": True} if name == "flops_profiler" else {})
    DeepSpeedConfig(asked)
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    removed = set(_REMOVED_TOP_LEVEL_CONFIG_KEYS)
    blocks: dict[str, Any] = {"": sorted((asked.keys_asked | {"sequence_parallel_size"}) - removed)}
    blocks |= {name: sorted(asked[name].keys_asked) for name in (*BLOCKS, "optimizer", "scheduler")}
    strict: list[str] = []
    models = {
        "zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig, "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig, "csv_monitor": CSVConfig, "comet": CometConfig,
    }  # fmt: skip
    for name, model in models.items():
        for path, keys in _fields(model, name):
            blocks[path] = keys
            strict.append(path)
    return {
        "deepspeed": deepspeed.__version__,
        "blocks": dict(sorted(blocks.items())),
        "strict": sorted(strict),
        "open": OPEN,
        "removed": sorted([*removed, *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)]),
    }


def _fields(model: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    yield path, sorted(info.alias or name for name, info in model.model_fields.items())
    for name, info in model.model_fields.items():
        inner = _model_in(info.annotation)
        if inner is not None:
            yield from _fields(inner, f"{path}.{name}")


def _model_in(annotation: Any) -> Any:
    from pydantic import BaseModel

    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def text() -> str:
    """The table as it is kept."""
    return json.dumps(harvest(), indent=1) + "\n"


if __name__ == "__main__":
    made = text()
    if "--write" in sys.argv:
        TABLE.write_text(made)
    else:
        sys.stdout.write(made)
