"""Estimate plans by running them on a virtual GPU.

    for estimate in estimate_plans(plans, spec, cluster):
        ...

Torch is imported only in child processes.
"""

from collections.abc import Iterator, Sequence

from dstune.cluster import Cluster
from dstune.estimator.host import host_memory
from dstune.estimator.job import Answer, Job
from dstune.estimator.overhead import overhead
from dstune.estimator.pool import Pool
from dstune.estimator.replay import Replay, min_capacity_bytes, replay
from dstune.estimator.result import Estimate, GpuEstimate, HostEstimate, Phase, Refusal, Shortage
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
) -> Iterator[tuple[int, Estimate | Refusal]]:
    """Run each plan in a process of its own and yield its position and result as it is done.

    Args:
        plans: What to try.
        model: What to train.
        cluster: Where.
        num_parallel: Processes at once; by default as many as there are cores.
        routing: Where tokens go in a mixture of experts.
    """
    with Pool(num_parallel) as pool:
        jobs = [
            Job(
                plan=plan,
                model=model,
                compute_capability=cluster.gpu.compute_capability,
                num_multiprocessors=cluster.gpu.num_multiprocessors,
                capacity_bytes=cluster.gpu.capacity_bytes,
                tape_path=pool.tape_path(),
                routing=routing,
            )
            for plan in plans
        ]
        for number, answer, tape in pool.run(jobs):
            if tape is None:
                yield number, _refusal(plans[number], answer)
            else:
                yield number, _estimate(plans[number], cluster, answer, tape)


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
        host=_host(cluster, tape),
        num_parameters=answer.num_parameters,
        optimizer=answer.optimizer,
        num_ops=answer.num_ops,
        seconds=answer.seconds,
        notes=answer.notes,
    )


def _gpu(plan: TrainingPlan, cluster: Cluster, tape: Tape) -> GpuEstimate:
    played = replay(tape, alloc_conf=plan.alloc_conf)
    outside = overhead(plan.world_size).size_bytes
    needed = min_capacity_bytes(tape, played, plan.alloc_conf)
    room = cluster.gpu.capacity_bytes - outside
    fits = needed <= room
    return GpuEstimate(
        peak_allocated_bytes=played.peak_allocated,
        peak_reserved_bytes=played.peak_reserved,
        min_capacity_bytes=needed,
        overhead_bytes=outside,
        capacity_bytes=cluster.gpu.capacity_bytes,
        fits=fits,
        peak_phase=played.peak_phase,
        phases=_phases(played),
        shortage=None if fits else _shortage(replay(tape, max(0, room), plan.alloc_conf)),
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


def _host(cluster: Cluster, tape: Tape) -> HostEstimate:
    memory = host_memory(tape)
    per_node = memory.total * cluster.gpus_per_node
    return HostEstimate(
        pinned_bytes=memory.pinned,
        pageable_bytes=memory.pageable,
        per_node_bytes=per_node,
        capacity_bytes=cluster.host_bytes,
        fits=None if cluster.host_bytes is None else per_node <= cluster.host_bytes,
    )
