"""The table of estimates, one row at a time, so that rows appear as they are done."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from dstune.estimator.result import Estimate, Refusal
from dstune.plan import TrainingPlan
from dstune.units import gib
from dstune.vocab import Verdict


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table of estimates."""

    name: str
    width: int
    right: bool = False


COLUMNS = (
    Column("ZeRO", 4),
    Column("offload", 15),
    Column("prec.", 5),
    Column("ckpt", 9),
    Column("batch", 5, right=True),
    Column("allocated", 9, right=True),
    Column("reserved", 8, right=True),
    Column("needs", 7, right=True),
    Column("pinned", 7, right=True),
    Column("pageable", 8, right=True),
    Column("peak in", 8),
    Column("verdict", 24),
)
"""`batch` is the largest micro-batch that fits, if it was asked for; `needs` the smallest GPU on which the step still
runs, what lies outside torch included; `pinned` and `pageable` are host memory of a whole node. A column that does not
vary is left to the caption."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns a table has."""

    hidden: frozenset[str]

    @classmethod
    def of(cls, plans: Sequence[TrainingPlan], *, find_largest: bool = False) -> "Layout":
        """Hide what is the same in every row."""
        same = len({plan.activation_checkpointing for plan in plans}) == 1
        return cls(frozenset({"ckpt"} if same else ()) | frozenset(() if find_largest else {"batch"}))

    def header(self) -> str:
        """The line above the rows, and the rule under it."""
        line = self._line([column.name for column in COLUMNS])
        return f"{line}\n{'-' * len(line)}"

    def row(self, result: Estimate | Refusal, label: str | None = None) -> Text:
        """One row."""
        plan = result.plan
        lead = [
            label or str(plan.zero_stage),
            "-" if plan.offload == "none" else plan.offload.value,
            plan.precision.value,
            plan.activation_checkpointing.value,
            str(plan.micro_batch if isinstance(result, Refusal) else _batch(result)),
        ]
        numbers, phase, verdict, style = _cells(result)
        return Text.assemble(self._line([*lead, *numbers, phase, ""]), (verdict, style))

    def _line(self, cells: Sequence[str]) -> str:
        return " ".join(
            cell.rjust(column.width)
            if column.right
            else cell.ljust(column.width)
            if column is not COLUMNS[-1]
            else cell
            for column, cell in zip(COLUMNS, cells, strict=True)
            if column.name not in self.hidden
        )


def _batch(estimate: Estimate) -> int:
    """The largest micro-batch that fits, if it was looked for."""
    return estimate.plan.micro_batch if estimate.largest_micro_batch is None else estimate.largest_micro_batch


def _cells(result: Estimate | Refusal) -> tuple[list[str], str, str, str]:
    """Numbers, phase, verdict, colour."""
    if isinstance(result, Refusal):
        reason = result.because[0] if result.because else result.message
        return ["-"] * 5, "-", f"cannot run: {reason}"[:90], "yellow"
    gpu, host = result.gpu, result.host
    ranks = result.plan.ranks_per_node
    sizes = (
        gpu.peak_allocated_bytes,
        gpu.peak_reserved_bytes,
        gpu.needed_bytes,
        host.pinned_bytes * ranks,
        host.pageable_bytes * ranks,
    )
    verdict, style = _verdict(result)
    return [gib(size) for size in sizes], gpu.peak_phase, verdict, style


def _verdict(estimate: Estimate) -> tuple[str, str]:
    gpu, host = estimate.gpu, estimate.host
    if gpu.verdict is Verdict.TIGHT and estimate.host.fits is not False:
        return f"tight, may lack {gib(gpu.sure_bytes - gpu.capacity_bytes)}", "yellow"
    if gpu.verdict is Verdict.OVER:
        where = f" in {gpu.shortage.phase}" if gpu.shortage and gpu.shortage.phase else ""
        return f"over by {gib(gpu.needed_bytes - gpu.capacity_bytes)}{where}", "red"
    if host.fits is False and host.capacity_bytes is not None:
        return f"host over by {gib(host.per_node_bytes - host.capacity_bytes)}", "red"
    return f"fits, {gib(gpu.capacity_bytes - gpu.sure_bytes)} free", "green"
