"""Rules about keys that nobody reads: unknown, removed, renamed."""

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from dstune.lint.rule import AUTO, Case, Deed, Fix, Problem, Remove, Rename, Replace, Rule, Severity, when
from dstune.lint.rules.example import example, zero

MEANT = {
    "profiling": "flops_profiler", "gradient_checkpointing": "activation_checkpointing",
    "checkpointing": "activation_checkpointing", "micro_batch_size": "train_micro_batch_size_per_gpu",
    "batch_size": "train_batch_size", "grad_clip": "gradient_clipping", "max_grad_norm": "gradient_clipping",
    "lr_scheduler": "scheduler", "zero": "zero_optimization",
    "thread_count": "intra_op_parallelism", "mixed_precision": "bf16",
    "grad_accum": "gradient_accumulation_steps", "offload_params": "offload_param",
    "offload_optim": "offload_optimizer", "stage3_gather_16bit_weights": "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip
"""What people write whose letters do not show what they mean."""
NUM_TOP_LEVEL_REST = 0.6
"""Likeness from which a name is suggested."""


@cache
def known_keys() -> dict[str, Any]:
    """Keys of DeepSpeed 0.19.8, made by `python -m tests.lint.harvest`; a test asks the installed version again."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "known_keys.json").read_text())
    return found


def _unknown(case: Case, *, strict: bool) -> Iterator[Problem]:
    table = known_keys()
    yield from _unknown_in(case.config, "", table, strict=strict)


def _unknown_in(block: Any, path: str, table: dict[str, Any], *, strict: bool) -> Iterator[Problem]:
    known = table["blocks"].get(path)
    if known is None or path in table["open"] or not isinstance(block, dict):
        return
    for key, value in block.items():
        dotted = f"{path}.{key}" if path else key
        if key in known:
            yield from _unknown_in(value, dotted, table, strict=strict)
        elif dotted not in table["removed"] and (path in table["strict"]) is strict:
            yield _problem(dotted, key, path, known, strict=strict)


def _problem(dotted: str, key: str, path: str, known: list[str], *, strict: bool) -> Problem:
    suggestion = _suggest(key, path, known)
    where = f"`{path}`" if path else "DeepSpeed"
    message = f"{where} has no key `{key}`: " + ("DeepSpeed refuses it" if strict else "nothing reads it")
    if path == "bf16" and key in known_keys()["blocks"]["fp16"]:
        message = f"`{key}` belongs to fp16: bf16 has the range of fp32 and scales no loss"
        suggestion = ""
    return Problem(tuple(dotted.split(".")), message, suggestion=suggestion)


def _suggest(key: str, path: str, known: list[str]) -> str:
    meant = MEANT.get(key)
    if meant in known:
        return str(meant)
    close = difflib.get_close_matches(key, known, 1, NUM_TOP_LEVEL_REST)
    if close:
        return close[0]
    for block, keys in known_keys()["blocks"].items():
        if key in keys and block != path:
            return f"{block}.{key}" if block else f"{key} at the top level"
    return ""


def _removed(case: Case) -> Iterator[Problem]:
    for dotted in known_keys()["removed"]:
        if case.has(dotted):
            yield Problem(tuple(dotted.split(".")), f"DeepSpeed no longer has `{dotted}` and refuses the file")


def _cpu_offload(old: str, new: str) -> Any:
    def check(case: Case) -> Iterator[Problem]:
        value = case.get(f"zero_optimization.{old}")
        if value is None:
            return
        block = {"device": "cpu"}
        fix: Fix = Replace(block, new) if value is True else Remove()
        if case.has(f"zero_optimization.{new}"):
            yield Problem(("zero_optimization", old), f"`{old}` and its successor `{new}` are both given", Remove())
        else:
            yield Problem(("zero_optimization", old), f"`{old}` is now `{new}` with a device", fix)

    return check


def _misplaced_auto(case: Case) -> Iterator[Problem]:
    if case.document.syntax is None:
        return
    for path, value in _leaves(case.config, ()):
        if value == AUTO and ".".join(path) not in FILLED and path[0] not in {"pipeline", "tensor_parallel", "compile"}:
            yield Problem(path, "no trainer replaces `auto` here")


def _leaves(block: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


FILLED = frozenset(
    {
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
        "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled",
        "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.nvme_path", "zero_optimization.zenflow.select_strategy",
        "zero_optimization.zenflow.select_interval", "zero_optimization.zenflow.update_interval",
        "zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.sub_group_size", "zero_optimization.overlap_comm",
        "zero_optimization.allgather_bucket_size", "data_types.keep_in_fp32_modules",
    }
)  # fmt: skip
"""Where `auto` does no harm: Trainer (transformers integrations/deepspeed.py, trainer_config_process and _finalize),
Accelerate (accelerator.py, _prepare_deepspeed), and pydantic blocks that drop it (config_utils.py)."""

ZERO = "zero_optimization"
RULES = (
    Rule(
        "unknown-key", Severity.WARNING, "a key that DeepSpeed does not know, where it does not check",
        "Nothing reads it and nobody says so: what it was meant to do is not done. Correct it or take it out.",
        example(profiling={"enabled": True}), example(flops_profiler={"enabled": True}),
        lambda case: _unknown(case, strict=False), Deed.ACCEPTS, "", "dstune/lint/known_keys.json",
    ),
    Rule(
        "refused-key", Severity.ERROR, "a key that DeepSpeed does not know, in a block that it checks",
        "pydantic forbids extra keys there and training does not start. Correct it or take it out.",
        zero(2, overlap_com=True), zero(2, overlap_comm=True), lambda case: _unknown(case, strict=True),
        Deed.REFUSES, "Extra inputs", "deepspeed runtime/config_utils.py, DeepSpeedConfigModel.model_config",
    ),
    Rule(
        "removed-key", Severity.ERROR, "a feature that DeepSpeed has removed",
        "DeepSpeed 0.19 raises an exception for the key, even if the block says that it is off. Take it out; fp16, bf16"
        " and torch_autocast stand in for amp.",
        example(amp={"enabled": True}), example(bf16={"enabled": True}), _removed, Deed.REFUSES, "removed",
        "deepspeed runtime/config.py, _reject_removed_config_keys",
    ),
    Rule(
        "deprecated-cpu-offload", Severity.WARNING, "`cpu_offload` instead of `offload_optimizer`",
        "It still works, with a warning at each start, and cannot say where or how. `--fix` writes the block.",
        zero(2, cpu_offload=True), zero(2, offload_optimizer={"device": "cpu"}),
        _cpu_offload("cpu_offload", "offload_optimizer"), Deed.WARNS, "cpu_offload is deprecated",
        "deepspeed runtime/zero/config.py", is_fixable=True,
    ),
    Rule(
        "deprecated-cpu-offload-param", Severity.WARNING, "`cpu_offload_param` instead of `offload_param`",
        "It still works, with a warning at each start. `--fix` writes the block.",
        zero(3, cpu_offload_param=True), zero(3, offload_param={"device": "cpu"}),
        _cpu_offload("cpu_offload_param", "offload_param"), Deed.WARNS, "cpu_offload_param is deprecated",
        "deepspeed runtime/zero/config.py", is_fixable=True,
    ),
    Rule(
        "deprecated-pin-memory", Severity.WARNING, "`cpu_offload_use_pin_memory` instead of `pin_memory`",
        "DeepSpeed warns and does not carry the value over: `pin_memory` belongs into the offload block.",
        zero(2, cpu_offload_use_pin_memory=True, offload_optimizer={"device": "cpu"}),
        zero(2, offload_optimizer={"device": "cpu", "pin_memory": True}),
        when(lambda case: case.has(f"{ZERO}.cpu_offload_use_pin_memory"), f"{ZERO}.cpu_offload_use_pin_memory",
             "`cpu_offload_use_pin_memory` is no longer read: write `pin_memory` into the offload block"),
        Deed.WARNS, "cpu_offload_use_pin_memory is deprecated", "deepspeed runtime/zero/config.py",
    ),
    Rule(
        "deprecated-gather-fp16", Severity.WARNING, "`stage3_gather_fp16_weights_on_model_save`",
        "The key is now `stage3_gather_16bit_weights_on_model_save`, and does the same for bf16. `--fix` renames it.",
        zero(3, stage3_gather_fp16_weights_on_model_save=True), zero(3, stage3_gather_16bit_weights_on_model_save=True),
        when(lambda case: case.has(f"{ZERO}.stage3_gather_fp16_weights_on_model_save"),
             f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
             "the key is now `stage3_gather_16bit_weights_on_model_save`",
             Rename("stage3_gather_16bit_weights_on_model_save")),
        Deed.WARNS, "stage3_gather_fp16_weights_on_model_save is deprecated", "deepspeed runtime/zero/config.py",
        is_fixable=True,
    ),
    Rule(
        "deprecated-bfloat16", Severity.WARNING, "`bfloat16` instead of `bf16`",
        "The old name is read only if there is no `bf16` block. Give the block its present name.",
        example(bfloat16={"enabled": True}), example(bf16={"enabled": True}),
        when(lambda case: case.has("bfloat16"), "bfloat16", "the block is now called `bf16`", Rename("bf16")),
        Deed.ACCEPTS, "", "deepspeed runtime/precision_config.py, get_bfloat16_config", is_fixable=True,
    ),
    Rule(
        "zero-as-boolean", Severity.WARNING, "`zero_optimization` as true or false",
        "The oldest form: true means stage 1, whatever was hoped for. Write the block.",
        example(zero_optimization=True), example(zero_optimization={"stage": 1}),
        when(lambda case: isinstance(case.get(ZERO), bool), ZERO, "true means stage 1, false stage 0: write the block"),
        Deed.WARNS, "", "deepspeed runtime/zero/config.py, read_zero_config_deprecated",
    ),
    Rule(
        "auto-not-replaced", Severity.WARNING, "`auto` where no trainer replaces it",
        "Hugging Face's Trainer and Accelerate fill in a list of keys. Elsewhere the word stays, and DeepSpeed takes it"
        " for a value, or drops it. Write the value.",
        example(steps_per_print="auto"), example(steps_per_print=10), _misplaced_auto, Deed.ACCEPTS, "",
        "transformers integrations/deepspeed.py, trainer_config_process and trainer_config_finalize",
    ),
)  # fmt: skip
"""The table."""
