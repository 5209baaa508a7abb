"""What was asked before is answered from disk, whatever happens to the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.run import document, dstune
from tests.contract.test_estimate import ONE_ROW

LOADS = "loading torch"


def entries() -> list[Path]:
    return sorted(Path(os.environ["DSTUNE_CACHE_DIR"]).glob("*/*.json"))


def test_the_second_call_gives_the_same_table_without_loading_anything(tiny: str) -> None:
    words = ("estimate", tiny, "--gpu", "h200", "--gpus", "2", *ONE_ROW)
    first, second = dstune(*words), dstune(*words)
    assert LOADS in first.stderr
    assert second.stderr == ""
    assert second.stdout == first.stdout
    assert LOADS in dstune(*words, "--no-cache").stderr
    assert LOADS in dstune(*words, "--micro-batch", "2").stderr, "another plan"
    assert len(entries()) == 2


def test_a_damaged_entry_is_dropped_and_made_again(tiny: str) -> None:
    words = ("estimate", tiny, "--gpu", "h200", *ONE_ROW)
    first = dstune(*words)
    [entry] = entries()
    whole = entry.read_text()
    for damaged in (whole[: len(whole) // 2], "", whole.replace('"peak_allocated_bytes":', '"peak_allocated_bytes":1')):
        entry.write_text(damaged)
        again = dstune(*words)
        assert LOADS in again.stderr, "nothing damaged is believed"
        assert again.stdout == first.stdout
        assert entry.read_text() != damaged
        assert dstune(*words).stderr == ""


def test_a_refusal_that_lies_in_the_plan_is_kept_too(tiny: str, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 3, "zero_optimization": {"stage": 2}, "gradient_clipping": -1}))
    words = ("estimate", tiny, "--gpu", "h200", "--gpus", "2", "--ds-config", str(config), *ONE_ROW)
    first, second = dstune(*words), dstune(*words)
    assert first.returncode == second.returncode
    assert first.stdout == second.stdout


def test_processes_share_the_folder(tiny: str) -> None:
    words = [sys.executable, "-m", "dstune", "estimate", tiny, "--gpu", "h200", *ONE_ROW, "--json"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
    found = [json.loads(process.communicate(timeout=120)[0])["data"]["estimates"][0]["gpu"] for process in both]
    assert found[0] == found[1]
    assert len(entries()) == 1
    assert not list(entries()[0].parent.glob(".*")), "no unfinished file is left"


def test_a_folder_that_cannot_be_written_is_a_warning(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DSTUNE_CACHE_DIR", str(blocked))
    done = dstune("estimate", tiny, "--gpu", "h200", *ONE_ROW)
    assert done.returncode == 0
    assert "warning: estimates cannot be kept" in done.stderr


def test_the_cache_is_shown_and_cleared(tiny: str) -> None:
    dstune("estimate", tiny, "--gpu", "h200", *ONE_ROW)
    assert document(dstune("cache", "--json"))["data"]["num_entries"] == 1
    assert "1 estimates deleted" in dstune("cache", "--clear").stdout
    assert document(dstune("cache", "--json"))["data"]["size_bytes"] == 0
    assert LOADS in dstune("estimate", tiny, "--gpu", "h200", *ONE_ROW).stderr
