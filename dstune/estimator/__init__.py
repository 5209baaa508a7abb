"""Estimate plans by running them on a virtual GPU.

    for estimate in estimate_plans(plans, spec, cluster):
        ...

Torch is imported only in child processes.
"""

from collections.abc import Callable, Iterator, Sequence

from dstune.cluster import Cluster
from dstune.dsconfig import with_micro_batch
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.host import host_memory
from dstune.estimator.job import Answer, Job
from dstune.estimator.largest import search
from dstune.estimator.overhead import overhead
from dstune.estimator.pool import Pool, Task
from dstune.estimator.replay import Replay, replay
from dstune.estimator.result import Estimate, GpuEstimate, HostEstimate, Phase, Refusal, Shortage
from dstune.estimator.spread import min_capacity_bytes, spread, verdict_of
from dstune.estimator.tape import Tape
from dstune.model import ModelSpec
from dstune.plan import TrainingPlan
from dstune.vocab import Routing

__all__ = ["estimate_plans"]


def estimate_plans(
    plans: Sequence[TrainingPlan],
    model: ModelSpec,
    cluster: Cluster,
    *,
    num_parallel: int | None = None,
    routing: Routing = Routing.BALANCED,
    find_largest: bool = False,
) -> Iterator[tuple[int, Estimate | Refusal]]:
    """Run each plan in a process of its own and yield its position and result as it is done.

    Args:
        plans: What to try.
        model: What to train.
        cluster: Where.
        num_parallel: Processes at once; by default as many as there are cores.
        routing: Where tokens go in a mixture of experts.
        find_largest: Whether to look for the largest micro-batch that fits, instead of taking the plan's.
    """
    with Pool(num_parallel) as pool:

        def job(plan: TrainingPlan) -> Job:
            return Job(
                plan=plan,
                model=model,
                compute_capability=cluster.gpu.compute_capability,
                num_multiprocessors=cluster.gpu.num_multiprocessors,
                capacity_bytes=cluster.gpu.capacity_bytes,
                tape_path=pool.tape_path(),
                routing=routing,
            )

        kind = _largest if find_largest else _once
        yield from pool.drive([kind(plan, cluster, job) for plan in plans])


def _once(plan: TrainingPlan, cluster: Cluster, job: Callable[[TrainingPlan], Job]) -> Task[Estimate | Refusal]:
    answer, tape = yield job(plan)
    return _refusal(plan, answer) if tape is None else _estimate(plan, cluster, answer, tape)


def _largest(plan: TrainingPlan, cluster: Cluster, job: Callable[[TrainingPlan], Job]) -> Task[Estimate | Refusal]:
    """The estimate of the largest micro-batch that fits, or of 1 if none does."""
    found: dict[int, Estimate] = {}
    probes = search(cluster.gpu.capacity_bytes)
    probe = next(probes)
    while True:
        tried = with_micro_batch(plan, probe)
        result = yield from _once(tried, cluster, job)
        if isinstance(result, Refusal):
            return result
        found[probe] = result
        try:
            probe = probes.send((result.gpu.sure_bytes, result.gpu.fits))
        except StopIteration as end:
            return found[max(end.value, 1)].model_copy(update={"largest_micro_batch": end.value})


def _refusal(plan: TrainingPlan, answer: Answer) -> Refusal:
    failure = answer.failure
    assert failure is not None
    return Refusal(
        plan=plan,
        code=failure.code,
        message=failure.message,
        hint=failure.hint,
        because=failure.because,
        traceback=failure.traceback,
    )


def _estimate(plan: TrainingPlan, cluster: Cluster, answer: Answer, tape: Tape) -> Estimate:
    return Estimate(
        plan=plan,
        gpu=_gpu(plan, cluster, tape),
        host=_host(cluster, tape, answer.disk_bytes),
        num_parameters=answer.num_parameters,
        optimizer=answer.optimizer,
        num_ops=answer.num_ops,
        seconds=answer.seconds,
        notes=answer.notes,
    )


def _gpu(plan: TrainingPlan, cluster: Cluster, tape: Tape) -> GpuEstimate:
    conf = AllocConf.parse(plan.alloc_conf)
    played = replay(tape, conf=conf)
    outside = overhead(plan.world_size).size_bytes
    needed = min_capacity_bytes(tape, played, conf)
    found = spread(tape, conf, played, needed)
    room = cluster.gpu.capacity_bytes - outside
    if conf.memory_fraction is not None:
        room = min(room, int(conf.memory_fraction * cluster.gpu.capacity_bytes))
    return GpuEstimate(
        peak_allocated_bytes=played.peak_allocated,
        peak_reserved_bytes=played.peak_reserved,
        reserved_range_bytes=(found.low_reserved, found.high_reserved),
        min_capacity_bytes=needed,
        min_capacity_range_bytes=(found.low_capacity, found.high_capacity),
        overhead_bytes=outside,
        capacity_bytes=cluster.gpu.capacity_bytes,
        verdict=verdict_of(found, room),
        peak_phase=played.peak_phase,
        phases=_phases(played),
        shortage=None if needed <= room else _shortage(replay(tape, max(0, room), conf)),
    )


def _phases(played: Replay) -> tuple[Phase, ...]:
    return tuple(
        Phase(
            name=phase.name,
            allocated_bytes=phase.allocated,
            peak_allocated_bytes=phase.peak_allocated,
            reserved_bytes=phase.reserved,
            peak_reserved_bytes=phase.peak_reserved,
        )
        for phase in played.phases
    )


def _shortage(played: Replay) -> Shortage | None:
    if played.shortage is None:
        return None
    operation, _, module = played.shortage.label.partition(" ")
    return Shortage(
        segment_bytes=played.shortage.segment_bytes, operation=operation, module=module, phase=played.shortage.phase
    )


def _host(cluster: Cluster, tape: Tape, disk_bytes: int) -> HostEstimate:
    memory = host_memory(tape)
    per_node = memory.total * cluster.gpus_per_node
    return HostEstimate(
        pinned_bytes=memory.pinned,
        pageable_bytes=memory.pageable,
        by_owner_bytes=memory.by_owner,
        disk_bytes=disk_bytes,
        per_node_bytes=per_node,
        capacity_bytes=cluster.host_bytes,
        fits=None if cluster.host_bytes is None else per_node <= cluster.host_bytes,
    )
