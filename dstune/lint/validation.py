"""DeepSpeed's own validation, run for real on each file and brought back to a place in it."""

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from dstune.errors import MachineError
from dstune.lint.document import Document
from dstune.lint.rule import AUTO, Problem

SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "HybridEngineConfig": "hybrid_engine",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "TPTrainingConfig": "tensor_parallel",
}
"""Where the block of each pydantic model stands, by deepspeed 0.19.8."""
TIMEOUT_S = 120


def refusals(documents: Sequence[Document]) -> list[Problem | None]:
    """What DeepSpeed says of each document, None if it takes it.

    Raises:
        MachineError: DeepSpeed cannot be run here.
    """
    configs = [_as_trainers_do(document) for document in documents]
    command = [sys.executable, "-m", "dstune.lint.parsejob"]
    try:
        done = subprocess.run(
            command, input=json.dumps(configs), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError("DeepSpeed's parser did not answer", hint="pass --no-deepspeed") from error
    try:
        answers: list[dict[str, Any] | None] = json.loads(done.stdout)
    except ValueError as error:
        last = tuple(done.stderr.strip().splitlines()[-3:])
        raise MachineError("DeepSpeed cannot be imported here", hint="pass --no-deepspeed", because=last) from error
    return [None if answer is None else _problem(answer) for answer in answers]


def _problem(answer: dict[str, Any]) -> Problem:
    section = SECTIONS.get(answer["type"], "")
    path = (*(section.split(".") if section else ()), *answer["keys"])
    return Problem(path, f"DeepSpeed refuses the file: {answer['message'].strip().rstrip('.')}")


def _as_trainers_do(document: Document) -> dict[str, Any]:
    """Without `auto`, and with a batch size that one rank can have: the rules judge the arithmetic."""
    config = copy.deepcopy(document.config)
    _drop_auto(config)
    if "train_micro_batch_size_per_gpu" in config or "gradient_accumulation_steps" in config:
        config.pop("train_batch_size", None)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(config):
        config["train_micro_batch_size_per_gpu"] = 1
    return config


def _drop_auto(block: dict[str, Any]) -> None:
    for key, value in list(block.items()):
        if value == AUTO:
            del block[key]
        elif isinstance(value, dict):
            _drop_auto(value)
