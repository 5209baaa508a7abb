"""Command line of the accuracy suite."""

import argparse
import fnmatch
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.accuracy.compare import Comparison, compare
from tests.accuracy.record import load_rows


def main() -> int:
    """Predict every row of a file; exit 1 if one cannot be predicted."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument("file", type=Path, help="recorded runs, one JSON object a line")
    parser.add_argument("--only", default="*", metavar="GLOB", help="rows whose name matches")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--jobs", type=int, default=None, help="rows predicted at once")
    options = parser.parse_args()
    rows = [row for row in load_rows(options.file) if fnmatch.fnmatch(row["name"], options.only)]
    results = []
    for result in compare(rows, options.jobs):
        results.append(result)
        if not options.json:
            print(_line(result), flush=True)
    report = report_of(results)
    print(json.dumps(report, indent=1) if options.json else _summary_text(report["summary"]))
    return 1 if report["summary"]["failed"] else 0


def report_of(results: list[Comparison]) -> dict[str, Any]:
    """The JSON document."""
    peaks = [result.data for result in results if result.kind == "peak"]
    failed = [result.data for result in results if result.kind == "failed"]
    boundary = [result.data for result in results if result.kind == "boundary"]
    capped = [result.data for result in results if result.kind == "capped"]
    summary = {
        "rows": len(peaks) + len(failed),
        "failed": len(failed),
        "allocated": _spread([abs(row["allocated_error"]) for row in peaks]),
        "reserved": _spread([abs(row["reserved_error"]) for row in peaks]),
        "boundary_right": sum(row["true"] == row["predicted"] for row in boundary),
        "boundary": len(boundary),
        "capped_right": sum(row["true"] == row["predicted"] for row in capped),
        "capped": len(capped),
    }
    return {"rows": [*peaks, *failed], "boundary": boundary, "capped": capped, "summary": summary}


def _spread(errors: list[float]) -> dict[str, float]:
    if not errors:
        return {}
    ordered = sorted(errors)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "worst": ordered[-1],
    }


def _line(result: Comparison) -> str:
    data = result.data
    if result.kind == "peak":
        return (
            f"{result.name:36s} allocated {data['recorded_allocated_bytes']:>14,} {data['allocated_error']:+9.4%}   "
            f"reserved {data['recorded_reserved_bytes']:>14,} {data['reserved_error']:+9.4%}   "
            f"{data['num_ops']:>7} ops {data['seconds']:5.1f} s"
        )
    if result.kind == "failed":
        return f"{result.name:36s} FAILED: {data['reason']}"
    where = data.get("where", "")
    return f"{result.name:36s} true {data['true']}   predicted {data['predicted']}   {where}"


def _summary_text(summary: dict[str, Any]) -> str:
    lines = [f"{summary['rows']} rows, {summary['failed']} failed"]
    for name in ("allocated", "reserved"):
        if summary[name]:
            spread = ", ".join(f"{key} {value:.4%}" for key, value in summary[name].items())
            lines.append(f"{name} error: {spread}")
    lines.extend(
        f"{name}: {summary[f'{name}_right']} of {summary[name]} right"
        for name in ("boundary", "capped")
        if summary[name]
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
