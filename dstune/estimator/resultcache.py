"""Results kept on disk, so that what was asked before is answered at once.

A result is found again if the plan, the model, the cluster and every version that has a say are the same. Dstune's own
files count as a version of their own, so that a changed checkout never shows old numbers. Entries are written whole or
not at all, carry a checksum, and are dropped when they do not match it: any number of processes may share the folder.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, ValidationError

from dstune import __version__
from dstune.atomicfile import write_whole
from dstune.errors import MachineError
from dstune.estimator.job import Job
from dstune.estimator.result import Estimate, Refusal

ENVIRONMENT_VARIABLE = "DSTUNE_CACHE_DIR"
LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "accelerate", "numpy")
"""Whose code runs on the virtual GPU."""
DIGEST_DIGITS = 40
"""Of SHA-256: enough that no two jobs ever meet."""


class Entry(BaseModel):
    """One file of the cache."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checksum: str
    result: Estimate | Refusal


class ResultCache:
    """A folder of results.

    Args:
        folder: Where; by default `DSTUNE_CACHE_DIR`, or the platform's folder for caches.

    Attributes:
        fault: Why nothing could be written, once that has happened.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self.fault: str | None = None

    def find(self, job: Job) -> Estimate | Refusal | None:
        """The result of a job, or None. A damaged entry is deleted."""
        path = self._path(job)
        if path is None:
            return None
        try:
            entry = Entry.model_validate_json(path.read_bytes())
        except OSError:
            return None
        except ValidationError:
            entry = None
        if entry is None or entry.checksum != _checksum(entry.result):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return entry.result

    def keep(self, job: Job, result: Estimate | Refusal) -> None:
        """Write a result. A folder that cannot be written to is noted in `fault` and does no harm."""
        path = self._path(job)
        if path is None:
            return
        entry = Entry(checksum=_checksum(result), result=result)
        try:
            write_whole(path, entry.model_dump_json(round_trip=True))
        except MachineError as error:
            self.fault = error.because[0]

    def entries(self) -> Iterator[Path]:
        """Every entry's file, whatever version wrote it."""
        yield from self.folder.glob("*/*.json")

    def clear(self) -> int:
        """Delete all entries and what interrupted writers left; the number of entries deleted."""
        num_deleted = 0
        for path in [*self.entries(), *self.folder.glob("*/.*")]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                num_deleted += path.suffix == ".json"
        return num_deleted

    def _path(self, job: Job) -> Path | None:
        """Where a job's result lies; None for a model whose code is not named by any version."""
        if job.model.function is not None or job.model.trust_remote_code:
            return None
        text = json.dumps([job.model_dump(mode="json", exclude={"tape_path"}), _versions()], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]
        return self.folder / digest[:2] / f"{digest}.json"


def default_folder() -> Path:
    """Where results are kept unless another folder is given."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(named) if named else user_cache_path("dstune")


def _checksum(result: Estimate | Refusal) -> str:
    return hashlib.sha256(result.model_dump_json().encode()).hexdigest()


@cache
def _versions() -> dict[str, str]:
    """Of everything that has a say in a result."""
    found = {"python": sys.version, "dstune": f"{__version__} {_own_files()}"}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _own_files() -> str:
    """Changes when a file of the package does."""
    root = Path(__file__).parents[1]
    stats = [
        (str(path.relative_to(root)), path.stat().st_mtime_ns, path.stat().st_size)
        for pattern in ("*.py", "*.toml")
        for path in sorted(root.rglob(pattern))
    ]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:DIGEST_DIGITS]
