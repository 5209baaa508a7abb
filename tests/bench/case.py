"""What is timed: estimates after the imports, commands as a user types them, and the allocator's replay."""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dstune.cluster import Cluster
from dstune.cluster.catalogue import find_gpu
from dstune.estimator import estimate_plans
from dstune.estimator.grid import grid
from dstune.estimator.job import Job
from dstune.estimator.pool import Pool
from dstune.estimator.replay import replay
from dstune.estimator.tape import Kind, Tape
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing, Offload, Precision

NUM_EVENTS = 1_000_000
MIN_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """One line of the table; None where it means nothing.

    Attributes:
        wall_s: From the call to the last result.
        first_s: To the first result, where there are several.
        cpu_s: Of all forks together.
        num_ops: Operations run.
        peak_rss_bytes: Most memory that one process of ours held.
    """

    name: str
    wall_s: float
    limit_s: float | None = None
    first_s: float | None = None
    cpu_s: float | None = None
    num_ops: int | None = None
    peak_rss_bytes: int | None = None


def cluster_of(gpu: str, num_gpus: int) -> Cluster:
    per_node = min(num_gpus, 8)
    return Cluster(gpu=find_gpu(gpu), num_nodes=num_gpus // per_node, gpus_per_node=per_node, host_bytes=None)


def one_row(cluster: Cluster, stage: int, seq_len: int) -> list[TrainingPlan]:
    return _grid(cluster, [stage], [Offload.NONE], [Precision.BF16], seq_len)


def default_table(cluster: Cluster, seq_len: int) -> list[TrainingPlan]:
    return _grid(cluster, [0, 1, 2, 3], list(Offload), list(Precision), seq_len)


def _grid(
    cluster: Cluster, stages: list[int], offloads: list[Offload], precisions: list[Precision], seq_len: int
) -> list[TrainingPlan]:
    base = TrainingPlan(world_size=cluster.world_size, ranks_per_node=cluster.gpus_per_node, seq_len=seq_len)
    return grid(base, stages, offloads, precisions, [Checkpointing.OFF], zero_init=True)


def time_import() -> Timing:
    start = time.perf_counter()
    with Pool() as pool:
        pool.wait_until_loaded()
        return Timing("imports", time.perf_counter() - start)


def time_plans(
    name: str, model: str, cluster: Cluster, plans: Sequence[TrainingPlan], limit_s: float | None, *, fast: bool = True
) -> Timing:
    """All plans on all cores; the imports are done before the clock starts."""
    with Pool() as pool:
        pool.wait_until_loaded()
        start = time.perf_counter()
        jobs = [Job.on(cluster, plan, resolve(model), has_shortcuts=fast) for plan in plans]
        answers, first_s = [], 0.0
        for _, answer, _ in pool.run(jobs):
            assert answer.failure is None, answer.failure
            first_s = first_s or time.perf_counter() - start
            answers.append(answer)
        return Timing(
            name,
            time.perf_counter() - start,
            limit_s,
            first_s if len(plans) > 1 else None,
            sum(answer.cpu_s for answer in answers),
            sum(answer.num_ops for answer in answers),
            max(answer.peak_rss_bytes for answer in answers),
        )


def time_largest(
    name: str, model: str, cluster: Cluster, plan: TrainingPlan, limit_s: float, imports_s: float
) -> Timing:
    """The imports, which cannot be kept out of this call, are taken off."""
    start = time.perf_counter()
    results = list(estimate_plans([plan], resolve(model), cluster, find_largest=True))
    assert len(results) == 1
    return Timing(name, time.perf_counter() - start - imports_s, limit_s)


def time_command(name: str, words: Sequence[str], limit_s: float) -> Timing:
    """The median of several runs, after one that is not counted."""
    walls = []
    for _ in range(1 + MIN_REPEATS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dstune", *words], check=True, capture_output=True)
        walls.append(time.perf_counter() - start)
    return Timing(name, statistics.median(walls[1:]), limit_s)


def time_replay() -> Timing:
    """Blocks of many sizes that live for a while, as in a training step."""
    tape = Tape()
    sizes = [512 << (number % 15) for number in range(61)]
    half = NUM_EVENTS // 2
    for number in range(half):
        tape.append((Kind.ALLOC, number, sizes[number % 61], 0, 0))
        if number >= 200:
            tape.append((Kind.FREE, number - 200, 0, 0, 0))
    start = time.perf_counter()
    replay(tape)
    return Timing("allocator replay, a million events", time.perf_counter() - start, 2.0)
