"""`dstune emit-config`: the same bytes each time, nothing lost, and files that the real libraries read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstune.errors import ExitCode
from tests.contract.conftest import TINY
from tests.contract.run import ROOT, document, dstune

PLAN = (
    "--gpu", "24GiB", "--gpus", "1", "--global-batch", "16", "--seq-len", "32", "--zero", "2",
    "--offload", "optimizer", "--checkpointing", "off",
)  # fmt: skip
STUDY = ROOT / "tests" / "data" / "studies" / "search-gpt2-medium-24gib.jsonl"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder; what is estimated for it is kept for the next test."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def emit(tiny: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    cache = {"DSTUNE_CACHE_DIR": str(tiny / "cache")}
    return dstune("emit-config", "--from-estimate", str(tiny), *PLAN, *words, cwd=folder, env=cache)


def python(code: str, folder: Path) -> dict[str, object]:
    """What a program of a library's user sees."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.rsplit("#", 1)[1])
    return found


def test_the_choice_is_explained_and_the_bytes_are_the_same_each_time(tiny: Path, tmp_path: Path) -> None:
    done = emit(tiny, tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "least communication and recomputation" in done.stdout
    assert "= 16" in done.stdout
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"ds_config.json", "ds_config.dstune.json"}
    assert first["ds_config.json"].endswith(b"}\n")
    config = json.loads(first["ds_config.json"])
    assert config["train_batch_size"] == 16
    sidecar = json.loads(first["ds_config.dstune.json"])
    assert sidecar["plan"]["zero_stage"] == 2
    assert emit(tiny, tmp_path).returncode == ExitCode.OK
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_check_fails_with_a_diff_after_a_hand_edit_and_nothing_is_replaced(tiny: Path, tmp_path: Path) -> None:
    emit(tiny, tmp_path)
    assert emit(tiny, tmp_path, "--check").returncode == ExitCode.OK
    path = tmp_path / "ds_config.json"
    edited = path.read_text().replace('"stage": 2', '"stage": 1')
    path.write_text(edited)
    done = emit(tiny, tmp_path, "--check")
    assert done.returncode == ExitCode.NEGATIVE
    assert '-    "stage": 1' in done.stdout
    assert '+    "stage": 2' in done.stdout
    done = emit(tiny, tmp_path, "--diff", "--json")
    assert done.returncode == ExitCode.OK
    assert document(done)["data"]["is_stale"]
    done = emit(tiny, tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "--force" in done.stderr
    assert path.read_text() == edited
    assert emit(tiny, tmp_path, "--force").returncode == ExitCode.OK
    assert emit(tiny, tmp_path, "--check").returncode == ExitCode.OK


def test_a_base_keeps_its_keys_and_their_order(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        '{\n // ours\n "steps_per_print": 50, "zero_optimization": {"overlap_comm": true, "stage": 1}, "fp16":'
        ' {"enabled": true, "hysteresis": 4}, "optimizer": {"type": "Lion", "params": {"lr": 2e-4}}\n}\n'
    )
    assert emit(tiny, tmp_path, "--base", "mine.json").returncode == ExitCode.OK
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert list(config)[:4] == ["steps_per_print", "zero_optimization", "fp16", "optimizer"]
    assert list(config["zero_optimization"])[:2] == ["overlap_comm", "stage"]
    assert config["zero_optimization"]["stage"] == 2
    assert config["optimizer"] == {"type": "Lion", "params": {"lr": 2e-4}}
    assert config["fp16"] == {"enabled": False, "hysteresis": 4}
    assert config["bf16"] == {"enabled": True}


DEEPSPEED = """
import json
from deepspeed.runtime.config import DeepSpeedConfig
read = DeepSpeedConfig("ds_config.json")
print("#", json.dumps({"micro": read.train_micro_batch_size_per_gpu, "accumulation": read.gradient_accumulation_steps,
    "stage": int(read.zero_config.stage), "offload": str(read.zero_config.offload_optimizer.device),
    "bf16": read.bfloat16_config.enabled}))
"""
TRANSFORMERS = """
import json
from transformers import TrainingArguments
def make(**given):
    return TrainingArguments("out", use_cpu=True, **given)
args = eval(open("usage.txt").read(), {"TrainingArguments": make})
config = args.hf_deepspeed_config.config
print("#", json.dumps({"micro": config["train_micro_batch_size_per_gpu"],
    "accumulation": config["gradient_accumulation_steps"], "stage": config["zero_optimization"]["stage"],
    "offload": config["zero_optimization"]["offload_optimizer"]["device"], "bf16": config["bf16"]["enabled"]}))
"""
ACCELERATE = """
import json
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
found = load_config_from_file("ds_config.yaml")
assert str(found.distributed_type).endswith("DEEPSPEED"), found.distributed_type
plugin = DeepSpeedPlugin(hf_ds_config=found.deepspeed_config["deepspeed_config_file"])
config = plugin.deepspeed_config
print("#", json.dumps({"micro": config["train_micro_batch_size_per_gpu"],
    "accumulation": plugin.gradient_accumulation_steps, "stage": plugin.zero_stage,
    "offload": config["zero_optimization"]["offload_optimizer"]["device"], "bf16": config["bf16"]["enabled"]}))
"""
LIGHTNING = """
import json, re
from types import SimpleNamespace
from lightning.pytorch.strategies import DeepSpeedStrategy
usage = open("usage.txt").read()
strategy = DeepSpeedStrategy(config="ds_config.json")
accumulation = int(re.search(r"accumulate_grad_batches=(\\d+)", usage)[1])
strategy._lightning_module = SimpleNamespace(
    trainer=SimpleNamespace(accumulate_grad_batches=accumulation, gradient_clip_val=None))
strategy._format_batch_size_and_grad_accum_config()
config = strategy.config
print("#", json.dumps({"micro": config["train_micro_batch_size_per_gpu"],
    "accumulation": config["gradient_accumulation_steps"], "stage": config["zero_optimization"]["stage"],
    "offload": config["zero_optimization"]["offload_optimizer"]["device"], "bf16": config["bf16"]["enabled"]}))
"""


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("deepspeed", DEEPSPEED),
        ("transformers", TRANSFORMERS),
        ("accelerate", ACCELERATE),
        ("lightning", LIGHTNING),
    ],
)
def test_each_library_reads_back_what_was_tuned(target: str, code: str, tiny: Path, tmp_path: Path) -> None:
    done = emit(tiny, tmp_path, "--for", target, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    data = document(done)["data"]
    (tmp_path / "usage.txt").write_text("\n".join(data["usage"]))
    plan = data["plan"]
    assert python(code, tmp_path) == {
        "micro": plan["micro_batch"], "accumulation": plan["gradient_accumulation_steps"], "stage": 2,
        "offload": "cpu", "bf16": True,
    }  # fmt: skip


def test_the_fastest_trial_of_a_journal_is_written(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "journal.jsonl").write_bytes(STUDY.read_bytes() + b'{"trial": torn')
    done = dstune("emit-config", "study", cwd=tmp_path)
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.startswith("The fastest of 7 trials")
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert (config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]) == (1, 8)
    printed = dstune("emit-config", "study", "--output", "-", cwd=tmp_path).stdout
    assert json.loads(printed) == config


def test_wrong_use_says_what_to_do(tmp_path: Path) -> None:
    for words, said in (
        ((), "dstune search"),
        (("--from-estimate", "gpt2", "--gpu", "24GiB"), "--global-batch"),
        (("--from-estimate", "gpt2", "--gpu", "24GiB", "--gpus", "8", "--global-batch", "12"), "the nearest that can"),
        (("--for", "jax"), "--for"),
        (("--base", "nothing.json"), "cannot be read"),
    ):
        done = dstune("emit-config", *words, cwd=tmp_path)
        assert done.returncode == ExitCode.USAGE
        assert said in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_base_that_is_no_json_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"a": 1,\n "b": }')
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "journal.jsonl").write_bytes(STUDY.read_bytes())
    done = dstune("emit-config", "study", "--base", "base.json", cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "base.json:2:" in done.stderr


KILLED = """
import os, sys
from dstune import atomicfile
def die(*_): os._exit(9)
atomicfile.os.fsync = die
from dstune.cli import main
main(sys.argv[1:])
"""
"""Killed when all is written and nothing is renamed yet."""
LIMITED = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    "from dstune.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(("code", "status"), [(KILLED, 9), (LIMITED, ExitCode.ENVIRONMENT)], ids=["killed", "full"])
def test_a_write_that_fails_leaves_the_old_file_whole(code: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "journal.jsonl").write_bytes(STUDY.read_bytes())
    (tmp_path / "ds_config.json").write_text("{}\n")
    words = [sys.executable, "-c", code, "emit-config", "study", "--force"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "ds_config.json").read_text() == "{}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(STUDY.read_bytes())
    tmp_path.chmod(0o555)
    done = dstune("emit-config", str(tmp_path), "--output", str(tmp_path / "ds_config.json"))
    tmp_path.chmod(0o755)
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "cannot be written" in done.stderr
