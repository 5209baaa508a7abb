"""Say in one sentence why a job failed: whose fault, and what to do."""

import errno
import traceback
from pathlib import Path

from dstune.errors import DstuneError, MachineError, ModelError, RefusedConfigError
from dstune.estimator.job import Failure

NUM_FRAMES = 3
"""Last frames that are shown."""
TOO_LITTLE = {errno.ENOSPC: "disk space", errno.ENOMEM: "memory", errno.EDQUOT: "disk quota"}
"""Faults of the machine, and what it lacks."""
CARRIERS = frozenset({"torch", "pydantic", "dstune"})
"""Packages that only carry out what another asked for: their frames do not tell whose fault it is."""


def failure_from(error: BaseException) -> Failure:
    """Classify an exception by its type and by where it was raised."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, DstuneError):
        return Failure(code=error.code, message=error.message, hint=error.hint, because=error.because, traceback=trace)
    frames = traceback.extract_tb(error.__traceback__)
    lacking = "memory" if isinstance(error, MemoryError) else TOO_LITTLE.get(getattr(error, "errno", None) or 0)
    if lacking is not None:
        code, message = MachineError.code, f"this machine has too little {lacking} for the estimate itself"
        hint = "free some, or pass --jobs 1"
    elif _at_fault(frames) == "deepspeed":
        code, message = RefusedConfigError.code, "DeepSpeed refuses this configuration"
        hint = "change the key that it names, or leave the combination out"
    else:
        code, message = ModelError.code, "the model cannot be run"
        hint = "run it once on the CPU to see the same error, or pass --debug for the whole traceback"
    return Failure(code=code, message=message, hint=hint, because=(_reason(error), *_shown(frames)), traceback=trace)


def _at_fault(frames: traceback.StackSummary) -> str:
    """The package of the innermost frame that does not merely carry out."""
    for frame in reversed(frames):
        package = _package(frame.filename)
        if package not in CARRIERS:
            return package
    return ""


def _package(filename: str) -> str:
    """`deepspeed` for a file of the installed package, the folder's name for a file of the user's."""
    parts = Path(filename).parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return parts[parts.index(marker) + 1]
    return "dstune" if "dstune" in parts and "estimator" in parts else parts[-2] if len(parts) > 1 else ""


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _shown(frames: traceback.StackSummary) -> list[str]:
    """The last frames that are not torch's or ours."""
    chosen = [frame for frame in frames if _package(frame.filename) not in CARRIERS] or list(frames)
    return [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in chosen[-NUM_FRAMES:]
    ]
