"""The settings among which a search chooses: under a fixed global batch, each micro-batch has one accumulation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dstune.dsconfig import with_batch, with_zero_key
from dstune.errors import UsageError
from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing, Offload, Verdict

MAX_MICRO_BATCHES = 12
"""Of a track: beyond so many, the divisors of a global batch are thinned to those nearest to powers of two."""
LARGEST_MICRO_BATCH = 1024
"""Where doubling ends if no global batch bounds it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A key of `zero_optimization` that may be varied beside the batch.

    Attributes:
        values: Stage -> what to try; DeepSpeed's default at that stage is what every other trial has.
        source: Where the default stands.
    """

    values: Mapping[int, tuple[object, ...]]
    source: str


AXES = {
    "overlap_comm": Axis(
        {1: (True,), 2: (True,), 3: (False,)},
        "deepspeed 0.19.8 runtime/zero/config.py, overlap_comm_valid: true at stage 3, else false",
    ),
    "reduce_bucket_size": Axis(
        dict.fromkeys((1, 2, 3), (50_000_000, 200_000_000)),
        "deepspeed 0.19.8 runtime/zero/config.py: 500,000,000 elements",
    ),
    "allgather_bucket_size": Axis(
        dict.fromkeys((1, 2), (50_000_000, 200_000_000)),
        "deepspeed 0.19.8 runtime/zero/config.py: 500,000,000 elements",
    ),
    "stage3_prefetch_bucket_size": Axis(
        {3: (10_000_000, 200_000_000)}, "deepspeed 0.19.8 runtime/zero/config.py: 50,000,000 elements"
    ),
}
"""What `--axes` can name."""


@dataclass(frozen=True, slots=True)
class Track:
    """All settings that differ in micro-batch and accumulation only.

    Attributes:
        plans: By growing micro-batch.
        verdicts: What the estimator says of each; without an estimate each fits.
        needed_bytes: Predicted smallest capacity of each, where it was estimated.
        reserved_bytes: Predicted peak of reserved memory of each, where it was estimated.
        reason: Why none can run, if none can.
        base: Number of the track that this one varies in one key, or None.
    """

    plans: tuple[TrainingPlan, ...]
    verdicts: tuple[Verdict, ...]
    needed_bytes: tuple[int | None, ...] = ()
    reserved_bytes: tuple[int | None, ...] = ()
    reason: str = ""
    base: int | None = None

    @property
    def cost(self) -> tuple[int, int, int]:
        """Offload costs most, then recomputation, then stage: cheap tracks are tried first."""
        plan = self.plans[0]
        return (
            list(Offload).index(plan.offload),
            int(plan.activation_checkpointing is not Checkpointing.OFF),
            plan.zero_stage,
        )

    def candidates(self) -> list[int]:
        """Positions that may run."""
        return [number for number, verdict in enumerate(self.verdicts) if verdict is not Verdict.OVER]

    def without_estimate(self) -> "Track":
        """The same, all of it thought to fit."""
        unknown = (None,) * len(self.plans)
        return replace(
            self, verdicts=(Verdict.FITS,) * len(self.plans), needed_bytes=unknown, reserved_bytes=unknown, reason=""
        )


def read_global_batch(text: str, seq_len: int) -> int:
    """Sequences a step: `256`, or `524288 tokens`.

    Raises:
        UsageError: No number, or tokens that are no whole number of sequences.
    """
    match = re.fullmatch(r"\s*([\d_,]+)\s*(tokens?|t)?\s*", text)
    number = int(re.sub(r"\D", "", match.group(1)) or 0) if match else 0
    if match is None or number < 1:
        raise UsageError(f"`{text}` is no global batch", hint="write --global-batch 256, or '524288 tokens'")
    if match.group(2) is None:
        return number
    if number % seq_len:
        below = number - number % seq_len
        raise UsageError(
            f"{number} tokens are no whole number of sequences of {seq_len}",
            hint=f"'{below or seq_len} tokens' are {max(below // seq_len, 1)}",
        )
    return number // seq_len


def track_of(plan: TrainingPlan, global_batch: int | None, micro_batches: Sequence[int] | None) -> Track:
    """The track of a plan.

    Args:
        plan: All that does not vary.
        global_batch: Sequences a step over all ranks, or None: accumulation then stays the plan's.
        micro_batches: Those asked for, or None for all that make sense.

    Raises:
        UsageError: No micro-batch gives exactly the global batch.
    """
    sizes = _sizes(plan, global_batch, micro_batches)
    share = None if global_batch is None else global_batch // plan.data_parallel_size
    plans = tuple(
        with_batch(plan, size, plan.gradient_accumulation_steps if share is None else share // size) for size in sizes
    )
    return Track(plans, (), (), ()).without_estimate()


def _sizes(plan: TrainingPlan, global_batch: int | None, micro_batches: Sequence[int] | None) -> list[int]:
    if global_batch is None:
        doubled = [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length())]
        return sorted(set(micro_batches)) if micro_batches else doubled
    if global_batch % plan.data_parallel_size:
        nearest = max(1, round(global_batch / plan.data_parallel_size)) * plan.data_parallel_size
        raise UsageError(
            f"a global batch of {global_batch} cannot be divided among {plan.data_parallel_size} ranks",
            hint=f"the nearest that can is {nearest}",
        )
    share = global_batch // plan.data_parallel_size
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    if micro_batches is None:
        return _thinned(divisors)
    fitting = sorted(set(micro_batches) & set(divisors))
    if not fitting:
        raise UsageError(
            f"no micro-batch of {', '.join(map(str, micro_batches))} divides the {share} sequences of a rank",
            hint=f"those that do: {', '.join(map(str, divisors[:12]))}",
        )
    return fitting


def _thinned(divisors: list[int]) -> list[int]:
    """Those nearest to powers of two, if there are too many."""
    if len(divisors) <= MAX_MICRO_BATCHES:
        return divisors
    powers = [1 << power for power in range(divisors[-1].bit_length() + 1)]
    return sorted({min(divisors, key=lambda size: abs(size - power)) for power in powers} | {divisors[-1]})


def variants(tracks: Sequence[Track], axes: Sequence[str]) -> list[Track]:
    """Each track once more for each value of each axis. Verdicts are its base's: a trial corrects them."""
    found: list[Track] = []
    for number, track in enumerate(tracks):
        for axis in axes:
            for value in AXES[axis].values.get(track.plans[0].zero_stage, ()):
                plans = tuple(with_zero_key(plan, axis, value) for plan in track.plans)
                unknown = (None,) * len(plans)
                found.append(replace(track, plans=plans, needed_bytes=unknown, reserved_bytes=unknown, base=number))
    return found
