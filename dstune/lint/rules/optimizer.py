"""Rules about optimizers and learning-rate schedules."""

import difflib
from collections.abc import Iterator
from typing import Any

from dstune.lint.rule import AUTO, Case, Deed, Problem, Rule, Severity, when
from dstune.lint.rules.example import example, zero

OWN = ("adagrad", "adam", "adamw", "lamb", "mup_adam", "lion", "muon", "muadam", "muadamw", "musgd")
"""DeepSpeed's own names, in any case: runtime/config.py, DEEPSPEED_OPTIMIZERS."""
TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam", "Muon",
)  # fmt: skip
"""Classes of torch.optim, in exactly this case."""
GONE = ("onebitadam", "zerooneadam", "onebitlamb")
"""1-bit optimizers, which DeepSpeed 0.19 no longer has."""
UNTESTED = ("SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "Adafactor", "Lamb", "lamb")
"""Not in deepspeed runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS."""
ADAM_PARAMS = frozenset(
    {"lr", "betas", "eps", "weight_decay", "bias_correction", "torch_adam", "adam_w_mode", "amsgrad", "set_grad_none",
     "fp32_optimizer_states", "adamw_mode", "max_grad_norm", "freeze_step", "cuda_aware", "comm_backend_name"}
)  # fmt: skip
"""Of FusedAdam, DeepSpeedCPUAdam and torch's, with DeepSpeed's own two."""
SCHEDULES: dict[str, frozenset[str]] = {
    "LRRangeTest": frozenset({"lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
                              "lr_range_test_staircase"}),
    "OneCycle": frozenset({"cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size",
                           "cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count",
                           "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"}),
    "WarmupLR": frozenset({"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}),
    "WarmupDecayLR": frozenset({"total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps",
                                "warmup_type"}),
    "WarmupCosineLR": frozenset({"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio",
                                 "warmup_type"}),
}  # fmt: skip
"""Arguments of each class in deepspeed runtime/lr_schedules.py; a test asks the installed version."""
NEED_TOTAL = ("WarmupDecayLR", "WarmupCosineLR")


def _type(case: Case) -> str | None:
    value = case.get("optimizer.type")
    return value if isinstance(value, str) else None


def _unknown_optimizer(case: Case) -> Iterator[Problem]:
    name = _type(case)
    if name is None or name.lower() in OWN or name in TORCH or name == AUTO:
        return
    close = difflib.get_close_matches(name.lower(), [*OWN, *(one.lower() for one in TORCH)], 1)
    pretty = {one.lower(): one for one in TORCH}
    suggestion = pretty.get(close[0], close[0]) if close and name.lower() not in GONE else ""
    yield Problem(("optimizer", "type"), f"DeepSpeed and torch.optim have no optimizer `{name}`", suggestion=suggestion)


def _untested(case: Case) -> bool:
    return _type(case) in UNTESTED and case.stage > 0 and case.get("zero_allow_untested_optimizer") is not True


def _params(case: Case) -> Iterator[Problem]:
    if (_type(case) or "").lower() not in {"adam", "adamw"}:
        return
    params = case.block("optimizer.params")
    for key in params:
        if key not in ADAM_PARAMS and not (params.get("torch_adam") and key in {"foreach", "fused", "capturable"}):
            close = difflib.get_close_matches(key, sorted(ADAM_PARAMS), 1)
            path = ("optimizer", "params", key)
            yield Problem(path, f"Adam has no argument `{key}`", suggestion=close[0] if close else "")


def _strings(case: Case) -> Iterator[Problem]:
    for block in ("optimizer.params", "scheduler.params"):
        for key, value in case.block(block).items():
            if isinstance(value, str) and value != AUTO and _is_number(value):
                yield Problem((*block.split("."), key), f'`"{value}"` is a string: write the number without quotes')


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _schedule(case: Case) -> str | None:
    value = case.get("scheduler.type")
    return value if isinstance(value, str) and value != AUTO else None


def _unknown_schedule(case: Case) -> Iterator[Problem]:
    name = _schedule(case)
    if name is not None and name not in SCHEDULES and not name.endswith(("LR", "Restarts", "OnPlateau")):
        close = difflib.get_close_matches(name, list(SCHEDULES), 1)
        yield Problem(("scheduler", "type"), f"DeepSpeed and torch have no schedule `{name}`",
                      suggestion=close[0] if close else "")  # fmt: skip


def _schedule_params(case: Case) -> Iterator[Problem]:
    known = SCHEDULES.get(_schedule(case) or "")
    if known is None:
        return
    for key in case.block("scheduler.params"):
        if key not in known and key != "last_batch_iteration":
            close = difflib.get_close_matches(key, sorted(known), 1)
            path = ("scheduler", "params", key)
            yield Problem(path, f"{_schedule(case)} has no argument `{key}`", suggestion=close[0] if close else "")


def _no_total(case: Case) -> bool:
    return _schedule(case) in NEED_TOTAL and not case.has("scheduler.params.total_num_steps")


def _warmup(case: Case) -> Iterator[Problem]:
    total, warmup = (case.number(f"scheduler.params.{key}_num_steps") for key in ("total", "warmup"))
    if total is not None and warmup is not None and warmup >= total:
        yield Problem(("scheduler", "params", "warmup_num_steps"), f"warm-up of {warmup:g} steps never ends before"
                      f" step {total:g}, the last one")  # fmt: skip


def _adam(**params: Any) -> str:
    return example(bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 1e-5, **params}})


def _with(schedule: str, **params: Any) -> str:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    return example(bf16={"enabled": True}, optimizer=optimizer, scheduler={"type": schedule, "params": params})


RULES = (
    Rule(
        "unknown-optimizer", Severity.ERROR, "an optimizer that does not exist",
        "Other names than DeepSpeed's own are looked up in torch.optim, in exactly the case that is given: it fails at"
        " the start, not when the file is parsed.",
        example(optimizer={"type": "AdamX", "params": {"lr": 1e-5}}), _adam(), _unknown_optimizer,
        Deed.FAILS, "not a supported DeepSpeed Optimizer", "deepspeed runtime/engine.py, _configure_basic_optimizer",
    ),
    Rule(
        "untested-optimizer", Severity.ERROR, "an optimizer that ZeRO has not been tested with",
        "DeepSpeed asserts `zero_allow_untested_optimizer: true`. Set it, or use Adam, AdamW, Adagrad, Lion or Muon.",
        zero(2).replace('"bf16"', '"optimizer": {"type": "SGD", "params": {"lr": 1e-5}},\n  "bf16"'),
        zero(2).replace('"bf16"', '"zero_allow_untested_optimizer": true,\n  "optimizer": {"type": "SGD", "params":'
                        ' {"lr": 1e-5}},\n  "bf16"'),
        when(_untested, "optimizer.type", "`{value}` with ZeRO needs `zero_allow_untested_optimizer: true`"),
        Deed.FAILS, "untested ZeRO Optimizer", "deepspeed runtime/engine.py, _do_optimizer_sanity_check",
    ),
    Rule(
        "optimizer-without-type", Severity.WARNING, "an `optimizer` block without `type`",
        "DeepSpeed then ignores the block: without an optimizer in the code nothing is trained.",
        example(optimizer={"params": {"lr": 1e-5}}), _adam(),
        when(lambda case: isinstance(case.get("optimizer"), dict) and not case.has("optimizer.type"), "optimizer",
             "no `type` is given: the block is ignored"),
        Deed.ACCEPTS, "", "deepspeed runtime/config.py, get_optimizer_name",
    ),
    Rule(
        "max-grad-norm-in-optimizer", Severity.ERROR, "`max_grad_norm` among the optimizer's arguments",
        "DeepSpeed clips by its own key, `gradient_clipping`, and raises an exception for this one.",
        _adam(max_grad_norm=1.0), example(gradient_clipping=1.0, bf16={"enabled": True}),
        when(lambda case: case.has("optimizer.params.max_grad_norm"), "optimizer.params.max_grad_norm",
             "clip with `gradient_clipping` at the top level"),
        Deed.FAILS, "max_grad_norm", "deepspeed runtime/engine.py, _configure_basic_optimizer",
    ),
    Rule(
        "optimizer-argument-unknown", Severity.ERROR, "an argument that Adam does not have",
        "The optimizer's class is called with it and raises TypeError.", _adam(learning_rate=1e-5), _adam(), _params,
        Deed.FAILS, "unexpected keyword", "deepspeed ops/adam/fused_adam.py, cpu_adam.py; torch.optim.AdamW",
    ),
    Rule(
        "number-as-string", Severity.ERROR, "a number in quotes",
        "Learning rates in quotes (a YAML file turns 1e-5 into a string, for one) fail in the first comparison.",
        _adam().replace("1e-05", '"1e-5"'), _adam(), _strings, Deed.FAILS, "",
        "torch.optim.AdamW, deepspeed runtime/lr_schedules.py",
    ),
    Rule(
        "unknown-scheduler", Severity.ERROR, "a schedule that does not exist",
        "Other names than DeepSpeed's five are looked up in torch.optim.lr_scheduler at the start.",
        _with("WarmupLinear"), _with("WarmupLR"), _unknown_schedule, Deed.FAILS, "",
        "deepspeed runtime/engine.py, _scheduler_from_config",
    ),
    Rule(
        "scheduler-argument-unknown", Severity.ERROR, "an argument that the schedule does not have",
        "Its class is called with it and raises TypeError.", _with("WarmupLR", warmup_steps=10),
        _with("WarmupLR", warmup_num_steps=10), _schedule_params, Deed.FAILS, "unexpected keyword",
        "deepspeed runtime/lr_schedules.py",
    ),
    Rule(
        "schedule-without-total", Severity.ERROR, "a decay without `total_num_steps`",
        "WarmupDecayLR and WarmupCosineLR must know the end. Hugging Face fills it in where it says auto.",
        _with("WarmupDecayLR", warmup_num_steps=10), _with("WarmupDecayLR", warmup_num_steps=10, total_num_steps=100),
        when(_no_total, "scheduler", "the schedule needs `total_num_steps`"), Deed.FAILS, "total_num_steps",
        "deepspeed runtime/lr_schedules.py",
    ),
    Rule(
        "no-warmup-steps", Severity.ERROR, "`warmup_num_steps` below 1",
        "DeepSpeed takes at least 1 since 0.19.6; before, 0 was taken for 2.",
        _with("WarmupLR", warmup_num_steps=0), _with("WarmupLR", warmup_num_steps=1),
        when(lambda case: (case.number("scheduler.params.warmup_num_steps") or 1) < 1
             or case.number("scheduler.params.warmup_num_steps") == 0, "scheduler.params.warmup_num_steps",
             "`warmup_num_steps` is {value}: at least 1"),
        Deed.FAILS, "warmup_num_steps", "deepspeed runtime/lr_schedules.py",
    ),
    Rule(
        "warmup-type-unknown", Severity.WARNING, "a `warmup_type` that DeepSpeed does not have",
        "It is log or linear; for anything else DeepSpeed takes log, with a line in the log. A cosine decay is"
        " WarmupCosineLR.",
        _with("WarmupLR", warmup_type="cosine"), _with("WarmupLR", warmup_type="linear"),
        when(lambda case: case.get("scheduler.params.warmup_type", "log") not in {"log", "linear", AUTO},
             "scheduler.params.warmup_type", "`{value}` is not known, log is taken: it is log or linear"),
        Deed.ACCEPTS, "", "deepspeed runtime/lr_schedules.py, WarmupLR",
    ),
    Rule(
        "warmup-never-ends", Severity.WARNING, "a warm-up as long as the training",
        "The learning rate rises until the end and never decays.",
        _with("WarmupDecayLR", warmup_num_steps=100, total_num_steps=100),
        _with("WarmupDecayLR", warmup_num_steps=10, total_num_steps=100), _warmup, Deed.ACCEPTS, "",
        "deepspeed runtime/lr_schedules.py, WarmupDecayLR",
    ),
)  # fmt: skip
"""The table."""
