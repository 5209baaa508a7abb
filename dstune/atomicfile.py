"""A file that is written whole or not at all."""

import os
import tempfile
from pathlib import Path

from dstune.errors import MachineError


def write_whole(path: Path, text: str) -> None:
    """Write a file so that at every moment either the old content is there or the new.

    Raises:
        MachineError: It cannot be written; the old content is untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as unfinished:
            try:
                unfinished.write(text)
                unfinished.flush()
                os.fsync(unfinished.fileno())
            except OSError:
                Path(unfinished.name).unlink()
                raise
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        Path(unfinished.name).chmod(mode)
        Path(unfinished.name).replace(path)
    except OSError as error:
        raise MachineError(f"`{path}` cannot be written", because=(str(error),)) from error


def _umask() -> int:
    held = os.umask(0)
    os.umask(held)
    return held
