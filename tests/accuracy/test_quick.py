"""A subset of the recorded runs on every change; the whole of them is `python -m tests.accuracy FILE.jsonl`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accuracy.compare import Comparison, compare
from tests.accuracy.record import Row, load_rows

DATA = Path(__file__).parents[1] / "data/measured"
PEAKS = {
    "memory.jsonl": (
        "gpt2-z0-bf16-w1-sgd gpt2-z1-fp16-w8-optcpu-gas2 gpt2-z2-bf16-w8 gpt2-z2-bf16-w8-mask gpt2-z2-fp32-w4 "
        "gpt2-z3-bf16-w2-both bertl-z2-bf16-w8 tiny-z2-lora-bf16-w4 tiny-z2-bf16-w8-ckpt"
    ),
    "operations.jsonl": (
        "ops-gpt2-eager-z0 ops-gpt2-ckptre-z3 ops-llama-z3 ops-llama7-z2-gas2 ops-mixtral-z2 ops-gemma-z2 ops-phi3-z2 "
        "ops-opt-z1-fp16 ops-neox-z2 ops-vit-z1 ops-qwen3-z3-both"
    ),
    "settings.jsonl": (
        "set-autocast-z1 set-bf16master-states-z2 set-adafactor-z2 set-muon-z2 set-hpz-z3 set-dsckpt-z3-cpu "
        "set-twinflow-z3 set-split128 set-roundlist attn-flash-gem-z2 set-zenflow-z3 set-exp-zi-z3"
    ),
    "models.jsonl": "fam-gptoss-z2 fam-olmoe-z3 fam-whisper-z2 fam-swin-z2 fam-mt5-z2 fam-debertav2-z2",
}
CAPPED = ["capped-gpt2-z2-w8-cap16-mb14", "capped-tiny-z3-w8-cap16-mb2", "capped-tiny-z3-w8-cap16-mb3"]


def rows_named(file: str, names: list[str]) -> list[Row]:
    return [row for row in load_rows(DATA / file) if row["name"] in names]


@pytest.fixture(scope="module")
def results() -> dict[str, Comparison]:
    rows = [row for file, names in PEAKS.items() for row in rows_named(file, names.split())]
    rows += rows_named("capped.jsonl", CAPPED) + rows_named("memory.jsonl", ["bound-tiny-z3-w8-cap16"])
    return {result.name: result for result in compare(rows)}


@pytest.mark.parametrize("name", " ".join(PEAKS.values()).split())
def test_peaks_are_the_recorded_ones(name: str, results: dict[str, Comparison]) -> None:
    result = results[name]
    assert result.kind == "peak", result.data
    assert abs(result.data["allocated_error"]) < 0.0001
    assert abs(result.data["reserved_error"]) < 0.0001


@pytest.mark.parametrize("name", CAPPED)
def test_it_runs_out_of_memory_where_the_gpu_does(name: str, results: dict[str, Comparison]) -> None:
    assert results[name].data["predicted"] == results[name].data["true"]


def test_the_largest_micro_batch_of_one_engine(results: dict[str, Comparison]) -> None:
    data = results["bound-tiny-z3-w8-cap16"].data
    assert data["predicted"] == data["true"]


def test_the_command_prints_the_documented_json(tmp_path: Path) -> None:
    [row] = rows_named("memory.jsonl", ["solo-gpt2-nccl"])
    broken = {**row, "name": "broken", "model": {**row["model"], "model_class": "NoSuchModel"}}
    file = tmp_path / "rows.jsonl"
    strange = {**row, "name": "strange", "model_options": {"attn": "of the future"}}
    file.write_text("\n".join(map(json.dumps, (row, broken, strange))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.accuracy", str(file), "--json"],
        capture_output=True, text=True, timeout=200, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert set(report) == {"rows", "boundary", "capped", "summary"}
    assert abs(report["rows"][0]["allocated_error"]) < 0.0001
    assert [row["failed"] for row in report["rows"][1:]] == [True, True]
    assert (report["summary"]["failed"], done.returncode) == (2, 1)
