"""The JSON envelope that every command prints with `--json`: one document, nothing else."""

import json
from typing import Any

from dstune import __version__
from dstune.errors import DstuneError, ExitCode
from dstune.estimator.result import Estimate, Refusal
from dstune.search.trial import Trial

SCHEMA = 1
"""Keys are only ever added; a removal makes this 2."""


def envelope(
    command: str,
    exit_code: ExitCode,
    data: dict[str, Any] | None = None,
    *,
    warnings: tuple[str, ...] = (),
    errors: tuple[dict[str, Any], ...] = (),
) -> str:
    """One JSON document."""
    status = {ExitCode.OK: "ok", ExitCode.NEGATIVE: "negative"}.get(exit_code, "error")
    document = {
        "schema": SCHEMA,
        "dstune": __version__,
        "command": command,
        "status": status,
        "exit_code": int(exit_code),
        "data": data or {},
        "warnings": list(warnings),
        "errors": list(errors),
    }
    return json.dumps(document, indent=2)


def error_entry(error: DstuneError) -> dict[str, Any]:
    """An error as the envelope has it."""
    return {"code": error.code, "message": error.message, "hint": error.hint, "because": list(error.because)}


def refusal_entry(refusal: Refusal) -> dict[str, Any]:
    """A plan that cannot be run, as the envelope's `errors` has it."""
    return {
        "code": refusal.code,
        "message": refusal.message,
        "hint": refusal.hint,
        "because": list(refusal.because),
        "plan": _plan(refusal),
    }


def estimate_entry(estimate: Estimate) -> dict[str, Any]:
    """One of `data.estimates[]`."""
    entry = estimate.model_dump(mode="json")
    entry["plan"] = _plan(estimate)
    return entry


def trial_entry(trial: Trial) -> dict[str, Any]:
    """One of `data.trials[]`."""
    entry = trial.model_dump(mode="json")
    entry["plan"] = trial.plan.model_dump(mode="json", exclude_none=True)
    return {**entry, "samples_per_s": trial.samples_per_s, "tokens_per_s": trial.tokens_per_s}


def _plan(owner: Estimate | Refusal) -> dict[str, Any]:
    """The plan without fields that say nothing."""
    return owner.plan.model_dump(mode="json", exclude_none=True)
