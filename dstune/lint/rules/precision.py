"""Rules about data types and loss scaling."""

from collections.abc import Iterator

from dstune.lint.rule import AUTO, Case, Check, Deed, Problem, Remove, Rule, Severity, Surroundings, when
from dstune.lint.rules.example import example, zero

HIGH_POWER = 24
"""Scales that fp16 gradients of this size overflow at for sure: fp16 ends at 65,504, so 8 steps are lost from 2^24."""
DTYPES = frozenset({"fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half", "int8"})
TRAINABLE = DTYPES - {"int8"}
DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
DEFAULT_POWER = 16


def _enabled(case: Case, block: str) -> bool:
    return case.get(f"{block}.enabled") is True


def _unknown_dtype(dotted: str, allowed: frozenset[str]) -> Check:
    def check(case: Case) -> Iterator[Problem]:
        value = case.get(dotted)
        if value is not None and value != AUTO and str(value).removeprefix("torch.") not in allowed:
            yield Problem(tuple(dotted.split(".")), f"`{value}` is no data type for this: it is fp32, fp16 or bf16")

    return check


def _static_scale(case: Case) -> Iterator[Problem]:
    if _enabled(case, "fp16") and (case.number("fp16.loss_scale") or 0) > 0:
        for key in DYNAMIC:
            if case.has(f"fp16.{key}"):
                yield Problem(("fp16", key), f"`{key}` has no effect: `loss_scale` sets a fixed scale", Remove())


def _power(case: Case) -> Iterator[Problem]:
    power = case.number("fp16.initial_scale_power")
    if power is not None and power >= HIGH_POWER and not (case.number("fp16.loss_scale") or 0):
        message = f"the first scale is 2^{power:g}: about {power - DEFAULT_POWER:g} steps or more are skipped"
        yield Problem(("fp16", "initial_scale_power"), message + f" until it fits; the default is {DEFAULT_POWER}")


def _old_gpu(case: Case) -> Iterator[Problem]:
    gpu = case.around.gpu
    if gpu is not None and gpu[1] < (8, 0) and _enabled(case, "bf16"):
        yield Problem(("bf16",), f"{gpu[0]} has no bf16 units (they come with compute capability 8.0): use fp16")


def _fp16_model(case: Case) -> Iterator[Problem]:
    if case.around.model_dtype == "bfloat16" and _enabled(case, "fp16"):
        yield Problem(("fp16",), "the model was trained in bf16: its activations may exceed fp16's 65,504")


def _no_precision(case: Case) -> bool:
    blocks = ("bf16", "bfloat16", "fp16", "torch_autocast", "amp")
    return case.document.fault is None and not case.has_auto and not any(case.has(block) for block in blocks)


def _all_off(case: Case) -> bool:
    values = [case.get(f"{name}.enabled") for name in ("bf16", "fp16", "torch_autocast") if case.has(name)]
    return bool(values) and not any(value is True or value == AUTO for value in values)


RULES = (
    Rule(
        "fp16-and-bf16", Severity.ERROR, "fp16 and bf16 both enabled",
        "DeepSpeed raises an assertion: choose one. bf16 needs no loss scale.",
        example(fp16={"enabled": True}, bf16={"enabled": True}), example(bf16={"enabled": True}),
        when(lambda case: _enabled(case, "fp16") and _enabled(case, "bf16"), "fp16", "fp16 and bf16 are both enabled"),
        Deed.REFUSES, "cannot be simultaneously enabled", "deepspeed runtime/config.py, _initialize_params",
    ),
    Rule(
        "no-precision", Severity.NOTE, "no half precision at all",
        "Without bf16, fp16 or torch_autocast parameters, gradients and activations are fp32: twice the memory, and on"
        " tensor cores a fraction of the speed.",
        example(), example(bf16={"enabled": True}),
        lambda case: [Problem((), "trains in fp32: no bf16, fp16 or torch_autocast is enabled")]
        if _no_precision(case) or _all_off(case) else [],
        Deed.ACCEPTS, "", "deepspeed runtime/engine.py, get_data_types",
    ),
    Rule(
        "high-initial-scale", Severity.WARNING, "a first loss scale far beyond what fp16 can hold",
        "The scale is halved at each overflow, and a step with an overflow is skipped: with accumulation, all its"
        " micro-steps are lost. Leave the key out: 16 is the default.",
        example(fp16={"enabled": True, "initial_scale_power": 32}), example(fp16={"enabled": True}), _power,
        Deed.ACCEPTS, "", "deepspeed runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale",
    ),
    Rule(
        "dynamic-keys-with-static-scale", Severity.WARNING, "settings of dynamic loss scaling beside a fixed scale",
        "`loss_scale` other than 0 fixes the scale; the keys of dynamic scaling are not read.",
        example(fp16={"enabled": True, "loss_scale": 128, "hysteresis": 2}),
        example(fp16={"enabled": True, "loss_scale": 128}), _static_scale, Deed.ACCEPTS, "",
        "deepspeed runtime/fp16/loss_scaler.py, CreateLossScaler", is_fixable=True,
    ),
    Rule(
        "static-loss-scale", Severity.NOTE, "a fixed loss scale",
        "It never adapts: too small loses gradients, too large skips every step. 0 means dynamic.",
        example(fp16={"enabled": True, "loss_scale": 1024}), example(fp16={"enabled": True, "loss_scale": 0}),
        when(lambda case: _enabled(case, "fp16") and (case.number("fp16.loss_scale") or 0) > 0, "fp16.loss_scale",
             "the loss scale is {value} for good; 0 makes it dynamic"),
        Deed.ACCEPTS, "", "deepspeed runtime/fp16/loss_scaler.py, CreateLossScaler",
    ),
    Rule(
        "negative-loss-scale", Severity.ERROR, "a negative loss scale", "DeepSpeed takes 0 (dynamic) or more.",
        example(fp16={"enabled": True, "loss_scale": -1}), example(fp16={"enabled": True}),
        when(lambda case: (case.number("fp16.loss_scale") or 0) < 0, "fp16.loss_scale", "`loss_scale` is below zero"),
        Deed.REFUSES, "must be >= 0", "deepspeed runtime/precision_config.py",
    ),
    Rule(
        "fp16-master-weights-without-zero", Severity.ERROR, "`fp16_master_weights_and_grads` at stage 0",
        "DeepSpeed asserts stage 1, 2 or 3.", example(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
        example(fp16={"enabled": True}),
        when(lambda case: case.get("fp16.fp16_master_weights_and_grads") is True and case.stage == 0,
             "fp16.fp16_master_weights_and_grads", "needs ZeRO stage 1, 2 or 3"),
        Deed.REFUSES, "only supported with ZeRO", "deepspeed runtime/config.py, _do_error_check",
    ),
    Rule(
        "bf16-master-weights-without-zero", Severity.ERROR, "`bf16_master_weights_and_grads` at stage 0",
        "DeepSpeed asserts stage 1, 2 or 3.", example(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        zero(1), when(lambda case: case.get("bf16.bf16_master_weights_and_grads") is True and case.stage == 0,
             "bf16.bf16_master_weights_and_grads", "needs ZeRO stage 1, 2 or 3"),
        Deed.REFUSES, "only supported with ZeRO", "deepspeed runtime/config.py, _do_error_check",
    ),
    Rule(
        "bf16-states-without-master-weights", Severity.ERROR, "`bf16_optimizer_states` without bf16 master weights",
        "States in bf16 need the master weights in bf16 too, and ZeRO.",
        example(bf16={"enabled": True, "bf16_optimizer_states": True}, zero_optimization={"stage": 2}),
        example(bf16={"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
                zero_optimization={"stage": 2}),
        when(lambda case: case.get("bf16.bf16_optimizer_states") is True
             and case.get("bf16.bf16_master_weights_and_grads") is not True, "bf16.bf16_optimizer_states",
             "needs `bf16_master_weights_and_grads`"),
        Deed.REFUSES, "requires bf16_master_weights_and_grads", "deepspeed runtime/config.py, _do_error_check",
    ),
    Rule(
        "grad-accum-dtype-unknown", Severity.ERROR, "a data type that gradients cannot have",
        "It is parsed without a word and fails at the start. Use fp32, fp16 or bf16.",
        example(bf16={"enabled": True}, zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp8"}),
        example(bf16={"enabled": True}, zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp32"}),
        _unknown_dtype("data_types.grad_accum_dtype", TRAINABLE), Deed.FAILS, "",
        "deepspeed runtime/config.py, DtypeEnum",
    ),
    Rule(
        "communication-dtype-unknown", Severity.ERROR, "an unknown `communication_data_type`",
        "DeepSpeed raises an exception. Use fp32, fp16 or bf16.", example(communication_data_type="fp8"),
        example(communication_data_type="fp32"),
        _unknown_dtype("communication_data_type", frozenset({"fp32", "fp16", "bf16"})),
        Deed.REFUSES, "Invalid communication_data_type", "deepspeed runtime/config.py, get_communication_data_type",
    ),
    Rule(
        "autocast-dtype-unknown", Severity.ERROR, "an unknown `torch_autocast.dtype`",
        "DeepSpeed raises an exception. Use bfloat16 or float16.",
        example(torch_autocast={"enabled": True, "dtype": "fp8"}),
        example(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        _unknown_dtype("torch_autocast.dtype", DTYPES), Deed.REFUSES, "is not a valid DtypeEnum",
        "deepspeed runtime/config.py, get_torch_autocast_dtype",
    ),
    Rule(
        "fp16-keys-while-off", Severity.NOTE, "settings of fp16 while it is off",
        "Nothing scales the loss without fp16.", example(fp16={"enabled": False, "hysteresis": 2}),
        example(bf16={"enabled": True}),
        lambda case: [Problem(("fp16", key), f"`{key}` has no effect: fp16 is off", Remove())
                      for key in (*DYNAMIC, "loss_scale") if case.has(f"fp16.{key}")
                      and case.get("fp16.enabled", False) is False],
        Deed.ACCEPTS, "", "deepspeed runtime/config.py", is_fixable=True,
    ),
    Rule(
        "bf16-without-units", Severity.ERROR, "bf16 on a GPU that has none",
        "Before compute capability 8.0 (V100, T4) bf16 is emulated or refused.", example(bf16={"enabled": True}),
        example(fp16={"enabled": True}), _old_gpu, Deed.NOT_ASKED, "",
        "CUDA C++ Programming Guide, table of arithmetic instructions",
        surroundings=Surroundings(gpu=("Tesla V100-SXM2-32GB", (7, 0))),
    ),
    Rule(
        "fp16-for-bf16-model", Severity.WARNING, "fp16 for a model that was trained in bf16",
        "Values beyond 65,504 become infinite: the loss turns into NaN. Use bf16.", example(fp16={"enabled": True}),
        example(bf16={"enabled": True}), _fp16_model, Deed.NOT_ASKED, "", "dtype in the model's config.json",
        surroundings=Surroundings(model_dtype="bfloat16"),
    ),
)  # fmt: skip
"""The table."""
