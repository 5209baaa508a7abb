"""Estimate plans by running them on a virtual GPU.

    for estimate in estimate_plans(plans, spec, cluster):
        ...

Torch is imported only in child processes.
"""

from collections.abc import Callable, Iterator, Sequence

from dstune.cluster import Cluster
from dstune.dsconfig import with_micro_batch
from dstune.estimator.job import Answer, Job
from dstune.estimator.largest import search
from dstune.estimator.pool import Pool, Task
from dstune.estimator.result import Estimate, Refusal
from dstune.estimator.resultcache import ResultCache
from dstune.model import ModelSpec
from dstune.plan import TrainingPlan
from dstune.vocab import Routing, Verdict

__all__ = ["ResultCache", "bracket_plans", "estimate_plans"]

KEPT_REFUSALS = frozenset({"unsupported-operation", "model", "refused-config"})
"""Reasons that lie in the plan; others may be gone the next time."""


def estimate_plans(
    plans: Sequence[TrainingPlan],
    model: ModelSpec,
    cluster: Cluster,
    *,
    num_parallel: int | None = None,
    routing: Routing = Routing.BALANCED,
    find_largest: bool = False,
    cache: ResultCache | None = None,
    on_load: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Estimate | Refusal]]:
    """Run each plan in a process of its own and yield its position and result as it is done.

    Args:
        plans: What to try.
        model: What to train.
        cluster: Where.
        num_parallel: Processes at once; by default as many as there are cores.
        routing: Where tokens go in a mixture of experts.
        find_largest: Whether to look for the largest micro-batch that fits, instead of taking the plan's.
        cache: Results of earlier calls; a plan found there is not run.
        on_load: Called when a plan must be run, before torch is loaded.
    """
    with Pool(num_parallel, on_load) as pool:
        run = _runner(model, cluster, routing, cache)
        kind = _largest(cluster, run) if find_largest else run
        yield from pool.drive([kind(plan) for plan in plans])


def _runner(
    model: ModelSpec, cluster: Cluster, routing: Routing, cache: ResultCache | None
) -> Callable[[TrainingPlan], Task[Estimate | Refusal]]:
    """What gives a plan's result: the cache, or else a job."""

    def run(plan: TrainingPlan) -> Task[Estimate | Refusal]:
        job = Job.on(cluster, plan, model, routing=routing)
        kept = None if cache is None else cache.find(job)
        if kept is not None:
            return kept
        answer, _ = yield job
        result = _result(plan, answer)
        if cache is not None and (isinstance(result, Estimate) or result.code in KEPT_REFUSALS):
            cache.keep(job, result)
        return result

    return run


def bracket_plans(
    tracks: Sequence[Sequence[TrainingPlan]],
    model: ModelSpec,
    cluster: Cluster,
    *,
    num_parallel: int | None = None,
    routing: Routing = Routing.BALANCED,
    cache: ResultCache | None = None,
    on_load: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, dict[int, Estimate | Refusal]]]:
    """For lists of plans that need ever more memory, estimate those around the edge of what fits.

    Yields:
        A list's position, and estimates by position in it: of the last that fits, of all that are tight, and of the
        first that is over, where there are such; a refusal at 0 if the first plan cannot run at all.
    """
    with Pool(num_parallel, on_load) as pool:
        run = _runner(model, cluster, routing, cache)
        yield from pool.drive([_bracket(plans, run) for plans in tracks])


def _bracket(
    plans: Sequence[TrainingPlan], run: Callable[[TrainingPlan], Task[Estimate | Refusal]]
) -> Task[dict[int, Estimate | Refusal]]:
    """Bisect for the first plan that does not surely fit, then go on through the tight ones."""
    found: dict[int, Estimate | Refusal] = {}
    low, high = 0, len(plans)
    while low < high:
        middle = low if not found else (low + high) // 2
        result = found[middle] = yield from run(plans[middle])
        if isinstance(result, Refusal):
            return {0: result} if middle == 0 else found
        low, high = (middle + 1, high) if result.fits else (low, middle)
    for position in range(low, len(plans)):
        if position not in found:
            found[position] = yield from run(plans[position])
        result = found[position]
        if isinstance(result, Refusal) or result.gpu.verdict is not Verdict.TIGHT:
            break
    return found


def _largest(
    cluster: Cluster, run: Callable[[TrainingPlan], Task[Estimate | Refusal]]
) -> Callable[[TrainingPlan], Task[Estimate | Refusal]]:
    """Find the estimate of the largest micro-batch that fits, or of 1 if none does."""

    def find(plan: TrainingPlan) -> Task[Estimate | Refusal]:
        found: dict[int, Estimate] = {}
        probes = search(cluster.gpu.capacity_bytes)
        probe = next(probes)
        while True:
            result = yield from run(with_micro_batch(plan, probe))
            if isinstance(result, Refusal):
                return result
            found[probe] = result
            try:
                probe = probes.send((result.gpu.sure_bytes, result.gpu.fits))
            except StopIteration as end:
                return found[max(end.value, 1)].model_copy(update={"largest_micro_batch": end.value})

    return find


def _result(plan: TrainingPlan, answer: Answer) -> Estimate | Refusal:
    if answer.failure is not None:
        return Refusal(plan=plan, **answer.failure.model_dump())
    assert answer.gpu is not None
    assert answer.host is not None
    return Estimate(
        plan=plan,
        gpu=answer.gpu,
        host=answer.host,
        num_parameters=answer.num_parameters,
        optimizer=answer.optimizer,
        num_ops=answer.num_ops,
        seconds=answer.seconds,
        notes=answer.notes,
    )
