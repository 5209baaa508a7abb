"""Each patch is still needed: without it a small job fails or allocates something else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstune.estimator.patches import PATCHES, Patch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a job does without each patch. No compiler: without its patch an op builder would start one."""
    environment = {
        **os.environ,
        "CC": "false",
        "CXX": "false",
        "TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions")),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.patch_probe"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_jobs_run_with_all_patches(probe: dict[str, dict[str, str]]) -> None:
    assert all(len(digest) == 64 for digest in probe["expected"]), probe["expected"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_the_patch_is_needed(patch: Patch, probe: dict[str, dict[str, str]]) -> None:
    assert probe["without"][patch.target] != "same", f"{patch.target} changes nothing any more: remove its row"
    assert patch.why
    assert patch.until
