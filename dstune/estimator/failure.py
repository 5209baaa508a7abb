"""Say in one sentence why a job failed: whose fault, and what to do."""

import traceback
from pathlib import Path

from dstune.errors import DstuneError, ModelError, RefusedConfigError
from dstune.estimator.job import Failure

NUM_FRAMES = 3
"""Last frames of the user's own code that are shown."""


def failure_from(error: BaseException) -> Failure:
    """Classify an exception by its type and by where it was raised."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, DstuneError):
        return Failure(code=error.code, message=error.message, hint=error.hint, because=error.because, traceback=trace)
    frames = traceback.extract_tb(error.__traceback__)
    reason = _reason(error)
    if any(Path(frame.filename).parts[-2:-1] == ("deepspeed",) or "/deepspeed/" in frame.filename for frame in frames):
        return Failure(
            code=RefusedConfigError.code,
            message="DeepSpeed refuses this configuration",
            hint="change the key that it names, or leave the combination out",
            because=(reason, *_frames(frames, "deepspeed")),
            traceback=trace,
        )
    if isinstance(error, MemoryError):
        reason = "not enough memory on this machine for the estimate itself"
    return Failure(
        code=ModelError.code,
        message="the model cannot be run",
        hint="run it once on the CPU to see the same error, or pass --debug for the whole traceback",
        because=(reason, *_frames(frames, "")),
        traceback=trace,
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _frames(frames: traceback.StackSummary, package: str) -> list[str]:
    """The last frames, those of a package only if one is named."""
    chosen = [frame for frame in frames if f"/{package}/" in frame.filename] if package else list(frames)
    return [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in chosen[-NUM_FRAMES:]
    ]
