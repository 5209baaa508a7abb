"""Rules about batch sizes: train_batch_size = micro-batch x accumulation x data-parallel world size."""

from collections.abc import Iterator

from dstune.lint.rule import AUTO, Case, Deed, Problem, Rule, Severity, Surroundings, when
from dstune.lint.rules.example import example

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
SIZES = (TOTAL, MICRO, ACCUMULATION)


def _whole(case: Case, key: str) -> int | None:
    value = case.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _below_one(case: Case) -> Iterator[Problem]:
    for key in SIZES:
        value = case.number(key)
        if value is not None and value < 1:
            yield Problem((key,), f"`{key}` is {value}: it must be at least 1")


def _not_whole(case: Case) -> Iterator[Problem]:
    for key in SIZES:
        value = case.get(key)
        if value is not None and value != AUTO and (isinstance(value, bool) or not isinstance(value, int)):
            yield Problem((key,), f"`{key}` is `{value}`: it must be a whole number")


def _sharers(case: Case) -> int | None:
    """Ranks that train on sequences of their own, if the user said how many there are: Ulysses' groups count once.

    Source: deepspeed 0.19.8 `runtime/config.py`, DeepSpeedConfig.__init__.
    """
    ranks = case.around.world_size
    return ranks and ranks // (_whole(case, "sequence_parallel_size") or 1)


def _arithmetic(case: Case) -> Iterator[Problem]:
    total, micro, accumulation = (_whole(case, key) for key in SIZES)
    if total is None or (micro is None and accumulation is None):
        return
    each = (micro or 1) * (accumulation or 1)
    names = " x ".join(str(one) for one in (micro, accumulation) if one is not None)
    ranks = _sharers(case)
    if ranks is not None and (total % (each * ranks) or (micro and accumulation and total != each * ranks)):
        yield Problem((TOTAL,), f"{total} is not {names} x {ranks} ranks = {each * ranks}, nor a multiple that a free"
                      " factor could fill" if not (micro and accumulation) else
                      f"{total} is not {names} x {ranks} ranks = {each * ranks}")  # fmt: skip
    elif ranks is None and total % each:
        yield Problem((TOTAL,), f"{total} is no multiple of {names}: it works for no number of ranks")


def _world_sizes(case: Case) -> Iterator[Problem]:
    total, micro, accumulation = (_whole(case, key) for key in SIZES)
    if total is None or micro is None or case.around.world_size is not None:
        return
    ranks, rest = divmod(total, micro * (accumulation or 1))
    if rest:
        return
    if accumulation:
        yield Problem((TOTAL,), f"the three batch sizes fit {ranks} data-parallel rank{'s' * (ranks > 1)} and no other"
                      " number")  # fmt: skip
    else:
        yield Problem((TOTAL,), f"works for world sizes that divide {ranks}")


def _only_total(case: Case) -> bool:
    return _whole(case, TOTAL) is not None and not case.has(MICRO)


def _none_given(case: Case) -> bool:
    return case.document.fault is None and not case.has(TOTAL) and not case.has(MICRO)


RULES = (
    Rule(
        "no-batch-size", Severity.ERROR, "neither `train_batch_size` nor `train_micro_batch_size_per_gpu`",
        "DeepSpeed raises an assertion. Name the micro-batch: memory depends on it.",
        example(gradient_accumulation_steps=4), example(train_micro_batch_size_per_gpu=1),
        lambda case: [Problem((ACCUMULATION,) if case.has(ACCUMULATION) else (), "no batch size is given")]
        if _none_given(case) else [],
        Deed.REFUSES, "needs to be provided", "deepspeed runtime/config.py, _set_batch_related_parameters",
    ),
    Rule(
        "batch-below-one", Severity.ERROR, "a batch size of zero or less",
        "DeepSpeed raises an assertion.", example(train_micro_batch_size_per_gpu=0),
        example(train_micro_batch_size_per_gpu=1), _below_one, Deed.REFUSES, "has to be greater than 0|not defined",
        "deepspeed runtime/config.py, _batch_assertion",
    ),
    Rule(
        "batch-not-whole", Severity.ERROR, "a batch size that is no whole number",
        "A string or a fraction fails when DeepSpeed computes with it.",
        example(train_micro_batch_size_per_gpu="4"), example(train_micro_batch_size_per_gpu=4), _not_whole,
        Deed.REFUSES, "not supported between|greater than", "deepspeed runtime/config.py, _batch_assertion",
    ),
    Rule(
        "batch-arithmetic", Severity.ERROR, "batch sizes that do not multiply",
        "train_batch_size must be micro-batch x accumulation x data-parallel world size. Leave one of the three out:"
        " DeepSpeed computes it.",
        example(train_batch_size=32, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2),
        example(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), _arithmetic,
        Deed.REFUSES, "train_batch_size is not equal", "deepspeed runtime/config.py, _batch_assertion",
        surroundings=Surroundings(),
    ),
    Rule(
        "bound-to-world-size", Severity.NOTE, "batch sizes that fit some world sizes only",
        "With `train_batch_size` and another size fixed, the file stops working when the number of GPUs changes. Leave"
        " `train_batch_size` out, or lint with `--world-size`.",
        example(train_batch_size=32, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2),
        example(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), _world_sizes,
        Deed.REFUSES, r"32 != 4 \* 2 \* 1", "deepspeed runtime/config.py, _batch_assertion",
    ),
    Rule(
        "micro-batch-follows-world-size", Severity.WARNING, "only `train_batch_size` is given",
        "The micro-batch is then train_batch_size divided by accumulation and world size: with fewer GPUs each needs"
        " more memory. Name the micro-batch.",
        example(train_batch_size=32), example(train_micro_batch_size_per_gpu=4),
        when(_only_total, TOTAL, "the micro-batch, and with it memory, follows the number of GPUs"),
        Deed.ACCEPTS, "", "deepspeed runtime/config.py, _set_batch_related_parameters",
    ),
    Rule(
        "auto-batch-needs-trainer", Severity.NOTE, "`auto` for a batch size",
        "Hugging Face's Trainer and Accelerate replace it. DeepSpeed alone compares the word with a number and fails.",
        example(train_micro_batch_size_per_gpu="auto"), example(train_micro_batch_size_per_gpu=4),
        lambda case: [Problem((key,), "`auto` works with Hugging Face's Trainer or Accelerate only")
                      for key in SIZES if case.get(key) == AUTO][:1],
        Deed.REFUSES, "not supported between", "deepspeed runtime/config.py, _batch_assertion",
    ),
)  # fmt: skip
"""The table."""
