"""Locks of ops being compiled: a process killed in the middle leaves its own, and every later one waits for ever.

Source: torch `utils/cpp_extension.py`, `_jit_compile` and `_get_build_directory`; `utils/file_baton.py`.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

DEFAULT_ROOT = Path("~/.cache/torch_extensions")
"""Where torch compiles extensions unless TORCH_EXTENSIONS_DIR says otherwise."""


def build_locks() -> frozenset[Path]:
    """The locks that exist now."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or DEFAULT_ROOT).expanduser()
    return frozenset((*root.glob("*/lock"), *root.glob("*/*/lock")))


def release(locks: Iterable[Path]) -> None:
    """Remove locks whose owners are gone."""
    for lock in locks:
        with contextlib.suppress(OSError):
            lock.unlink()
