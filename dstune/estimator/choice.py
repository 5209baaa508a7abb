"""Which of the plans that fit to take: the one with the least communication and recomputation."""

from collections.abc import Sequence
from dataclasses import dataclass

from dstune.cluster import Cluster
from dstune.dsconfig import with_batch
from dstune.errors import BY_CODE, DstuneError, InternalError, UsageError
from dstune.estimator import ResultCache, estimate_plans
from dstune.estimator.result import Estimate, Refusal
from dstune.model import ModelSpec
from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing, Offload, Precision


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that was taken, and why.

    Attributes:
        estimate: What it needs.
        passed_over: Cheaper plans that do not fit, cheapest first.
    """

    estimate: Estimate
    passed_over: tuple[Estimate | Refusal, ...]


def cost_of(plan: TrainingPlan) -> tuple[int, int, int, int]:
    """Offload costs most, then recomputation, then stage; half precision before full."""
    return (
        list(Offload).index(plan.offload),
        int(plan.activation_checkpointing is not Checkpointing.OFF),
        plan.zero_stage,
        (Precision.BF16, Precision.FP16, Precision.FP32).index(plan.precision),
    )


def micro_batches_of(global_batch: int, world_size: int) -> list[int]:
    """Those that make exactly the global batch with some accumulation, smallest first.

    Raises:
        UsageError: The ranks cannot share it.
    """
    share, rest = divmod(global_batch, world_size)
    if rest or not share:
        nearest = max(1, round(global_batch / world_size)) * world_size
        raise UsageError(
            f"a global batch of {global_batch} cannot be divided among {world_size} ranks",
            hint=f"the nearest that can is {nearest}",
        )
    return [size for size in range(1, share + 1) if share % size == 0]


def choose(
    plans: Sequence[TrainingPlan], model: ModelSpec, cluster: Cluster, global_batch: int, num_parallel: int | None
) -> Choice | None:
    """The cheapest plan that fits with any micro-batch, with the largest micro-batch that fits.

    Returns:
        None if nothing fits.

    Raises:
        UsageError: The global batch cannot be shared.
        DstuneError: No plan can be run at all.
    """
    num_shares = plans[0].data_parallel_size
    sizes = micro_batches_of(global_batch, num_shares)
    ordered = sorted(plans, key=cost_of)
    cache = ResultCache()
    smallest = [with_batch(plan, sizes[0], global_batch // (sizes[0] * num_shares)) for plan in ordered]
    results: list[Estimate | Refusal] = []
    held: dict[int, Estimate | Refusal] = {}
    for number, result in estimate_plans(smallest, model, cluster, num_parallel=num_parallel, cache=cache):
        held[number] = result
        while len(results) in held and not _has_fit(results):
            results.append(held[len(results)])
        if _has_fit(results):
            break  # dearer plans need not be run
    if not _has_fit(results):
        _raise_if_hopeless(results)
        return None
    first = len(results) - 1
    best = _largest(smallest[first], sizes, model, cluster, global_batch)
    return Choice(best, tuple(results[:first]))


def _has_fit(results: Sequence[Estimate | Refusal]) -> bool:
    """Whether the last one fits: none is taken after that."""
    return bool(results) and isinstance(results[-1], Estimate) and results[-1].fits


def _largest(
    plan: TrainingPlan, sizes: Sequence[int], model: ModelSpec, cluster: Cluster, global_batch: int
) -> Estimate:
    """Bisect the micro-batches; memory grows with them."""
    cache = ResultCache()

    def run(size: int) -> Estimate | None:
        tried = with_batch(plan, size, global_batch // (size * plan.data_parallel_size))
        [(_, result)] = estimate_plans([tried], model, cluster, num_parallel=1, cache=cache)
        return result if isinstance(result, Estimate) and result.fits else None

    low, high = 0, len(sizes)
    best = run(sizes[0])
    assert best is not None  # the caller has seen it fit
    while high - low > 1:
        middle = (low + high) // 2
        fitting = run(sizes[middle])
        if fitting is None:
            high = middle
        else:
            low, best = middle, fitting
    return best


def _raise_if_hopeless(results: Sequence[Estimate | Refusal]) -> None:
    if any(isinstance(one, Estimate) for one in results):
        return
    refusal = results[0]
    assert isinstance(refusal, Refusal)
    kind: type[DstuneError] = BY_CODE.get(refusal.code, InternalError)
    raise kind(refusal.message, hint=refusal.hint, because=refusal.because)
