"""Start the real command in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def dstune(*words: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `dstune` and wait."""
    return subprocess.run(
        [sys.executable, "-m", "dstune", *words],
        capture_output=True, text=True, timeout=500, check=False, cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", **(env or {})},
    )  # fmt: skip


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON document on standard output."""
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed
