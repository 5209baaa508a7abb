"""Rules about the rest: gradients, checkpointing, logs."""

from collections.abc import Iterator

from dstune.lint.rule import Case, Check, Deed, Problem, Remove, Rule, Severity, when
from dstune.lint.rules.example import example, zero

CHECKPOINTING = "activation_checkpointing"
MODES = ("Ignore", "Warn", "Fail")
LEVELS = ("debug", "info", "warning", "error", "critical")


def _needs(key: str, other: str, message: str) -> Check:
    def check(case: Case) -> Iterator[Problem]:
        if case.get(f"{CHECKPOINTING}.{key}") is True and not case.get(f"{CHECKPOINTING}.{other}"):
            yield Problem((CHECKPOINTING, key), message)

    return check


def _clipping(case: Case) -> Iterator[Problem]:
    value = case.get("gradient_clipping")
    if isinstance(value, str) and value != "auto":
        yield Problem(("gradient_clipping",), f'`"{value}"` is a string: write the number without quotes')
    elif isinstance(value, bool):
        yield Problem(("gradient_clipping",), "true is the number 1, false 0: write the norm to clip to")


def _secret(case: Case) -> Iterator[Problem]:
    if isinstance(case.get("comet.api_key"), str) and case.get("comet.api_key"):
        yield Problem(("comet", "api_key"), "a secret in a file that is shared: set COMET_API_KEY in the environment")


RULES = (
    Rule(
        "sum-at-stage-3", Severity.ERROR, "gradients summed at stage 3",
        "`gradient_allreduce_op: sum` is refused at stage 3.",
        example(gradient_allreduce_op="sum", bf16={"enabled": True}, zero_optimization={"stage": 3}),
        example(gradient_allreduce_op="sum", bf16={"enabled": True}, zero_optimization={"stage": 2}),
        when(lambda case: case.get("gradient_allreduce_op") == "sum" and case.stage == 3,
             "gradient_allreduce_op", "stage 3 can only take the mean"),
        Deed.REFUSES, "not supported with ZeRO stage 3", "deepspeed runtime/config.py, _do_error_check",
    ),
    Rule(
        "allreduce-op-unknown", Severity.ERROR, "an unknown `gradient_allreduce_op`", "It is mean or sum.",
        example(gradient_allreduce_op="avg"), example(gradient_allreduce_op="mean"),
        when(lambda case: case.get("gradient_allreduce_op", "mean") not in {"mean", "sum"}, "gradient_allreduce_op",
             "`{value}` is not known: it is mean or sum"),
        Deed.REFUSES, "gradient_allreduce_op", "deepspeed runtime/config.py, get_gradient_allreduce_op",
    ),
    Rule(
        "clipping-not-a-number", Severity.ERROR, "`gradient_clipping` that is no number",
        "A string is compared with a number at the first step; true is the norm 1.", zero(2).replace(
            '"bf16"', '"gradient_clipping": "1.0",\n  "bf16"'),
        zero(2).replace('"bf16"', '"gradient_clipping": 1.0,\n  "bf16"'), _clipping, Deed.FAILS, "",
        "deepspeed runtime/zero/stage_1_and_2.py",
    ),
    Rule(
        "contiguous-checkpoints-without-number", Severity.ERROR,
        "`contiguous_memory_optimization` without `number_checkpoints`",
        "deepspeed.checkpointing asserts the number: it sizes the buffer.",
        example(activation_checkpointing={"partition_activations": True, "contiguous_memory_optimization": True}),
        example(activation_checkpointing={"partition_activations": True, "contiguous_memory_optimization": True,
                                          "number_checkpoints": 24}),
        _needs("contiguous_memory_optimization", "number_checkpoints", "needs `number_checkpoints`"), Deed.FAILS,
        "layers|num", "deepspeed runtime/activation_checkpointing/checkpointing.py, configure",
    ),
    Rule(
        "contiguous-checkpoints-without-partition", Severity.ERROR,
        "`contiguous_memory_optimization` without `partition_activations`",
        "deepspeed.checkpointing asserts that activations are partitioned.",
        example(activation_checkpointing={"contiguous_memory_optimization": True, "number_checkpoints": 24}),
        example(activation_checkpointing={"partition_activations": True, "contiguous_memory_optimization": True,
                                          "number_checkpoints": 24}),
        _needs("contiguous_memory_optimization", "partition_activations", "needs `partition_activations`"), Deed.FAILS,
        "partition", "deepspeed runtime/activation_checkpointing/checkpointing.py, configure",
    ),
    Rule(
        "checkpointing-of-trainer", Severity.WARNING, "`activation_checkpointing` in a file for Hugging Face",
        "The block configures deepspeed.checkpointing, which Megatron's models call. Hugging Face's models checkpoint"
        " with torch's function: set gradient_checkpointing in the training arguments instead.",
        example(train_micro_batch_size_per_gpu="auto", activation_checkpointing={"cpu_checkpointing": True}),
        example(train_micro_batch_size_per_gpu="auto"),
        when(lambda case: case.has_auto and any(value is True for value in case.block(CHECKPOINTING).values()),
             CHECKPOINTING, "has no effect with Hugging Face's models: use gradient_checkpointing"),
        Deed.NOT_ASKED, "", "transformers modeling_utils.py, gradient_checkpointing_enable",
    ),
    Rule(
        "predivide-without-prescale", Severity.WARNING, "`gradient_predivide_factor` without `prescale_gradients`",
        "At stage 0 the factor divides before, and multiplies after the reduction, only if gradients are prescaled.",
        example(gradient_predivide_factor=8.0), example(gradient_predivide_factor=8.0, prescale_gradients=True),
        when(lambda case: case.get("gradient_predivide_factor", 1) != 1 and case.stage == 0
             and case.get("prescale_gradients") is not True, "gradient_predivide_factor",
             "has no effect without `prescale_gradients`"),
        Deed.ACCEPTS, "", "deepspeed runtime/engine.py, allreduce_bucket",
    ),
    Rule(
        "tag-validation-unknown", Severity.ERROR, "an unknown `checkpoint.tag_validation`",
        "It is Ignore, Warn or Fail.", example(checkpoint={"tag_validation": "strict"}),
        example(checkpoint={"tag_validation": "Fail"}),
        when(lambda case: str(case.get("checkpoint.tag_validation", "warn")).lower() not in {"ignore", "warn", "fail"},
             "checkpoint.tag_validation", "`{value}` is not known: it is Ignore, Warn or Fail"),
        Deed.REFUSES, "tag_validation", "deepspeed runtime/config.py, get_checkpoint_tag_validation_mode",
    ),
    Rule(
        "wall-clock-breakdown", Severity.NOTE, "`wall_clock_breakdown` is on",
        "It waits for the GPU around each phase to time it: for measuring, not for training.",
        example(wall_clock_breakdown=True), example(wall_clock_breakdown=False),
        when(lambda case: case.get("wall_clock_breakdown") is True, "wall_clock_breakdown",
             "each phase is timed with the GPU synchronised: training is slower"),
        Deed.ACCEPTS, "", "deepspeed utils/timer.py, SynchronizedWallClockTimer",
    ),
    Rule(
        "flops-profiler-on", Severity.NOTE, "`flops_profiler` is on",
        "It profiles one step and turns `wall_clock_breakdown` on for all of them.",
        example(flops_profiler={"enabled": True}), example(flops_profiler={"enabled": False}),
        when(lambda case: case.get("flops_profiler.enabled") is True, "flops_profiler",
             "profiles one step and times all of them: training is slower"),
        Deed.ACCEPTS, "", "deepspeed runtime/config.py, wall_clock_breakdown",
    ),
    Rule(
        "comms-logger-on", Severity.NOTE, "`comms_logger` is on",
        "Each collective is waited for, so that it can be timed: nothing overlaps.",
        example(comms_logger={"enabled": True}), example(comms_logger={"enabled": False}),
        when(lambda case: case.get("comms_logger.enabled") is True, "comms_logger",
             "every collective is timed: training is slower"),
        Deed.ACCEPTS, "", "deepspeed comm/comm.py, timed_op",
    ),
    Rule(
        "memory-breakdown", Severity.NOTE, "`memory_breakdown` is on",
        "Memory is printed at each phase: for measuring, not for training.", example(memory_breakdown=True),
        example(memory_breakdown=False), when(lambda case: case.get("memory_breakdown") is True, "memory_breakdown",
        "memory is read and printed at each phase"), Deed.ACCEPTS, "", "deepspeed runtime/engine.py, see_memory_usage",
    ),
    Rule(
        "log-level-unknown", Severity.ERROR, "an unknown `log_level`", "It is debug, info, warning, error or critical.",
        example(log_level="verbose"), example(log_level="warning"),
        when(lambda case: case.get("log_level") is not None and str(case.get("log_level")).lower() not in LEVELS,
             "log_level", "`{value}` is no level: it is debug, info, warning, error or critical"),
        Deed.FAILS, "log", "deepspeed utils/logging.py",
    ),
    Rule(
        "secret-in-file", Severity.WARNING, "a secret in the file",
        "Whoever can read the file, or the log of the start, where DeepSpeed prints it, can use the key.",
        example(comet={"enabled": False, "api_key": "abc"}), example(comet={"enabled": False}), _secret, Deed.ACCEPTS,
        "", "deepspeed runtime/config.py, print_user_config",
    ),
    Rule(
        "dump-state", Severity.NOTE, "`dump_state` is on", "The whole configuration is printed at the start.",
        example(dump_state=True), example(dump_state=False),
        when(lambda case: case.get("dump_state") is True, "dump_state", "prints the state at the start", Remove()),
        Deed.ACCEPTS, "", "deepspeed runtime/engine.py, dump_state", is_fixable=True,
    ),
)  # fmt: skip
"""The table."""
