"""From a tape to what is said of a plan: replay it, bound it, compare it with the cluster. Runs where the tape is."""

from dstune.cluster import Cluster
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.host import host_memory
from dstune.estimator.overhead import overhead
from dstune.estimator.replay import Replay, replay
from dstune.estimator.result import GpuEstimate, HostEstimate, Phase, Shortage
from dstune.estimator.spread import min_capacity_bytes, spread, verdict_of
from dstune.estimator.tape import Tape
from dstune.plan import TrainingPlan


def assess_gpu(plan: TrainingPlan, cluster: Cluster, tape: Tape) -> GpuEstimate:
    """What a tape needs of a GPU."""
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


def assess_host(cluster: Cluster, tape: Tape, disk_bytes: int) -> HostEstimate:
    """What a tape needs of a node, all its processes together."""
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
