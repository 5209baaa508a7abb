"""The study's journal: append-only JSON lines, each on disk before the search goes on.

Killed at any moment, a search resumes. The first line says what is searched, each other one is a finished trial. A last
line that was torn by a crash is cut off when the journal is opened again.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from dstune.errors import ConfigFileError, MachineError, UsageError
from dstune.search.trial import Outcome, Trial

NAME = "journal.jsonl"
LOCK = ".lock"


class Journal:
    """An open journal; only one process at a time has it.

    Args:
        folder: The study's folder, made if need be.
        header: What is searched; it must be that of an existing journal.
        restart: Whether an existing journal is put aside.

    Attributes:
        trials: Those that have ended, in order.

    Raises:
        UsageError: Another search is running there, or another study lies there.
        ConfigFileError: A line in the middle cannot be read.
        MachineError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, header: dict[str, Any], *, restart: bool = False) -> None:
        self.path = folder / NAME
        self._header = json.loads(json.dumps(header))
        self._restart = restart
        self.trials: list[Trial] = []

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path.parent / LOCK).open("w")
            try:
                self._open()
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise MachineError(
                f"`{self.path.parent}` cannot be written to", hint="pass another --output", because=(str(error),)
            ) from error
        return self

    def _open(self) -> None:
        """Take the folder for this process, read what is there, and be ready to append."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another search is running in `{self.path.parent}`", hint="wait for it, or pass another --output"
            ) from None
        if self._restart and self.path.exists():
            self.path.replace(self.path.with_suffix(".old.jsonl"))
        self._read()
        self._file = self.path.open("ab")
        if not self._file.tell():
            self._append({"study": self._header})

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.close()

    def add(self, trial: Trial) -> None:
        """Write a finished trial; it is on disk when this returns."""
        try:
            self._append({"trial": trial.model_dump(mode="json")})
        except OSError as error:
            raise MachineError(f"`{self.path}` cannot be written to", because=(str(error),)) from error
        self.trials.append(trial)

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)
        header, self.trials = read_lines(self.path, content[:whole])
        if header is not None and header != self._header:
            changed = sorted(key for key in {*header, *self._header} if header.get(key) != self._header.get(key))
            raise UsageError(
                f"`{self.path}` is of another search: {', '.join(changed)} differ",
                hint="pass --restart to begin anew (the old journal is kept beside it), or another --output",
            )


def read_lines(path: Path, content: bytes) -> tuple[dict[str, Any] | None, list[Trial]]:
    """A journal's header and its trials, those that were interrupted left out.

    Raises:
        ConfigFileError: A line cannot be read; the message begins with its place.
    """
    header: dict[str, Any] | None = None
    trials: list[Trial] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = json.loads(line)
            if "study" in entry:
                header = entry["study"]
            else:
                trials.append(Trial.model_validate(entry["trial"]))
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ConfigFileError(
                f"{path}:{number}: no line of a journal",
                hint="pass --restart to begin anew",
                because=(str(error).split("\n")[0],),
            ) from error
    return header, [trial for trial in trials if trial.ending.outcome is not Outcome.INTERRUPTED]
