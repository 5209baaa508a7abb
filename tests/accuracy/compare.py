"""Predict recorded rows and say how far off each prediction is."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dstune.errors import DstuneError
from dstune.estimator.host import host_memory
from dstune.estimator.job import Answer
from dstune.estimator.pool import Pool
from dstune.estimator.replay import Replay, replay
from dstune.estimator.tape import Tape
from tests.accuracy.record import Row, capacity_bytes, conf_of, job_for, kind_of


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row, recorded and predicted.

    Attributes:
        kind: `peak`, `boundary`, `capped` or `failed`.
        data: What the JSON output says of it.
    """

    kind: str
    name: str
    data: dict[str, Any] = field(default_factory=dict)


def compare(rows: list[Row], num_parallel: int | None = None) -> Iterator[Comparison]:
    """Predict rows, each in its own process, and yield them as they are done."""
    with Pool(num_parallel) as pool:
        jobs, predicted = [], []
        for row in rows:
            try:
                jobs.append(job_for(row, pool.tape_path()))
                predicted.append(row)
            except (ValueError, KeyError, TypeError) as error:
                yield _failed(row, f"this row asks for what is not modelled: {error}")
        for number, answer, tape in pool.run(jobs):
            yield _compared(predicted[number], answer, tape)


def _compared(row: Row, answer: Answer, tape: Tape | None) -> Comparison:
    if tape is None:
        assert answer.failure is not None
        return _failed(row, "; ".join((answer.failure.message, *answer.failure.because[:1])))
    try:
        return {"peak": _peak, "boundary": _boundary, "capped": _capped}[kind_of(row)](row, answer, tape)
    except DstuneError as error:
        return _failed(row, error.message)


def _failed(row: Row, reason: str) -> Comparison:
    return Comparison("failed", row["name"], {"name": row["name"], "failed": True, "reason": " ".join(reason.split())})


def _peak(row: Row, answer: Answer, tape: Tape) -> Comparison:
    played = replay(tape, conf=conf_of(row))
    host = host_memory(tape)
    return Comparison(
        "peak",
        row["name"],
        {
            "name": row["name"],
            "recorded_allocated_bytes": row["peak_allocated"],
            "predicted_allocated_bytes": played.peak_allocated,
            "allocated_error": played.peak_allocated / row["peak_allocated"] - 1,
            "recorded_reserved_bytes": row["peak_reserved"],
            "predicted_reserved_bytes": played.peak_reserved,
            "reserved_error": played.peak_reserved / row["peak_reserved"] - 1,
            "recorded_host_bytes": row.get("host_rss_max"),
            "predicted_host_bytes": host.total,
            "recorded_pinned_bytes": (row.get("pinned_host") or {}).get("allocated_bytes.peak"),
            "predicted_pinned_bytes": host.pinned,
            "num_ops": answer.num_ops,
            "seconds": answer.seconds,
        },
    )


def _boundary(row: Row, _answer: Answer, tape: Tape) -> Comparison:
    true = max((entry["mbs"] for entry in row["boundary"] if entry["status"] == "ok"), default=0)
    played = replay(tape, capacity_bytes(row), conf_of(row), is_fraction=True)
    return Comparison("boundary", row["name"], {"name": row["name"], "true": true, "predicted": _largest(played)})


def _largest(played: Replay) -> int:
    done = [phase.name for phase in played.phases if phase.name.startswith("micro_batch")]
    return int(done[-1].removeprefix("micro_batch")) if done else 0


def _capped(row: Row, _answer: Answer, tape: Tape) -> Comparison:
    played = replay(tape, capacity_bytes(row), conf_of(row), is_fraction=True)
    true = f"oom {row['failed_allocation']}" if row["status"] == "oom" else "ok"
    predicted = f"oom {size_text(played.shortage.segment_bytes)}" if played.shortage else "ok"
    where = f"{played.shortage.phase}: {played.shortage.label}" if played.shortage else ""
    return Comparison(
        "capped",
        row["name"],
        {
            "name": row["name"],
            "true": true,
            "predicted": predicted,
            "where": where,
            "num_retries": played.allocator.num_retries,
        },
    )


def size_text(num_bytes: int) -> str:
    """A size as torch's out-of-memory message prints it (`format_size` in `CUDACachingAllocator.cpp`)."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"
