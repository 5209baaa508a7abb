"""`dstune search` as a user runs it, with real ranks on the CPU: it ends with an answer, and is never lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dstune.errors import ExitCode
from tests.contract.run import ROOT, document, dstune

WORDS = (
    "--launcher", "cpu", "--gpus", "2", "--global-batch", "8", "--seq-len", "16", "--zero", "1", "--micro-batch", "2,4",
    "--offload", "none", "--budget", "5m",
)  # fmt: skip


def search(tiny: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return dstune("search", tiny, *WORDS, "--output", str(folder), *words)


def started(tiny: str, folder: Path) -> subprocess.Popen[bytes]:
    """A search in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "dstune", "search", tiny, *WORDS, "--output", str(folder), "--max-trials", "4"],
        cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Trials' processes that are still there."""
    return [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])]


def trials_in(folder: Path) -> list[str]:
    return [line for line in (folder / "journal.jsonl").read_text().splitlines() if '"trial"' in line]


def test_a_search_ends_with_an_answer_and_resumes_without_repeating(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    done = search(tiny, folder, "--max-trials", "2", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    data = document(done)["data"]
    assert [trial["ending"]["outcome"] for trial in data["trials"]] == ["ok", "ok"]
    for trial in data["trials"]:
        plan = trial["plan"]
        assert plan["micro_batch"] * plan["gradient_accumulation_steps"] * plan["world_size"] == 8
    assert data["best"]["tokens_per_s"] == max(trial["tokens_per_s"] for trial in data["trials"])
    config = json.loads((folder / "ds_config.json").read_text())
    assert config["train_batch_size"] == 8
    assert config["train_micro_batch_size_per_gpu"] == data["best"]["plan"]["micro_batch"]
    journal = (folder / "journal.jsonl").read_bytes()
    (folder / "journal.jsonl").write_bytes(journal + b'{"trial": {"torn')
    again = search(tiny, folder, "--max-trials", "2", "--json")
    assert document(again)["data"]["best"] == data["best"]
    assert (folder / "journal.jsonl").read_bytes() == journal
    other = dstune("search", tiny, *WORDS, "--seq-len", "8", "--output", str(folder))
    assert other.returncode == ExitCode.USAGE
    assert "--restart" in other.stderr
    emitted = dstune("emit-config", str(folder), "--output", "-")
    assert json.loads(emitted.stdout) == config


def test_killed_in_a_trial_it_leaves_no_rank_and_resumes(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    process = started(tiny, folder)
    wait_for(folder / "trials" / "0002" / "order.json", process)
    second = search(tiny, folder)
    assert second.returncode == ExitCode.USAGE
    assert "another search is running" in second.stderr
    first = trials_in(folder)
    process.kill()
    process.communicate()
    psutil.wait_procs(ranks_of(folder), timeout=10)
    assert ranks_of(folder) == []
    done = search(tiny, folder, "--max-trials", "2")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "resumed: 1 trials" in done.stderr
    assert trials_in(folder)[:1] == first
    assert len(trials_in(folder)) == 2


def test_ctrl_c_stops_the_trial_and_says_how_to_go_on(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    process = started(tiny, folder)
    wait_for(folder / "trials" / "0002" / "order.json", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert b"resume with the same command" in err
    assert b"ds_config.json" in out
    assert ranks_of(folder) == []
    assert '"interrupted"' in (folder / "journal.jsonl").read_text()


def test_real_ranks_share_a_sequence(tiny: str, tmp_path: Path) -> None:
    words = ("--sequence-parallel", "2", "--max-trials", "1", "--json")
    done = search(tiny, tmp_path / "study", *words)
    [trial] = document(done)["data"]["trials"]
    assert trial["ending"]["outcome"] == "ok"
    assert trial["plan"]["micro_batch"] * trial["plan"]["gradient_accumulation_steps"] == 8  # one group, not two
    written = json.loads((tmp_path / "study/ds_config.json").read_text())
    assert (written["train_batch_size"], written["sequence_parallel_size"]) == (8, 2)


def test_a_trial_that_the_budget_cuts_short_is_tried_again(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    done = search(tiny, folder, "--max-trials", "1", "--budget", "1s")
    assert done.returncode == ExitCode.NEGATIVE, done.stderr
    assert "cut short by --budget" in done.stdout
    again = search(tiny, folder, "--max-trials", "1", "--json")
    assert again.returncode == ExitCode.OK, again.stderr
    data = document(again)["data"]
    assert [trial["ending"]["outcome"] for trial in data["trials"]] == ["ok"]
    assert len(trials_in(folder)) == 2


@pytest.mark.parametrize("words", [("--dry-run", "--gpu", "24GiB"), ("--launcher", "virtual", "--gpu", "24GiB")])
def test_without_a_gpu_what_would_be_tried_is_said(words: tuple[str, ...], tiny: str, tmp_path: Path) -> None:
    done = dstune(
        "search", tiny, "--gpus", "2", "--global-batch", "8", "--seq-len", "16", "--zero", "1", "--offload", "none",
        "--output", str(tmp_path / "study"), "--launcher", "local", *words, "--json",
    )  # fmt: skip
    assert done.returncode == ExitCode.OK, done.stderr
    assert document(done)["command"] == "search"
    assert not (tmp_path / "study" / "journal.jsonl").exists()


def test_wrong_use_says_what_to_do(tiny: str, tmp_path: Path) -> None:
    for words, said in (
        (("--global-batch", "9"), "the nearest that can"),
        (("--budget", "soon"), "--budget"),
        (("--micro-batch", "3"), "those that do"),
        (("--axes", "overlap"), "overlap_comm"),
        (("--launcher", "mpi"), "--launcher"),
    ):
        done = search(tiny, tmp_path / "study", *words)
        assert done.returncode == ExitCode.USAGE, words
        assert said in done.stderr
