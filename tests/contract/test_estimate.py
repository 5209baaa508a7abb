"""`dstune estimate` as a user runs it: real DeepSpeed in child processes, no GPU."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dstune.errors import ExitCode
from tests.contract.run import ROOT, document, dstune

ONE_ROW = ("--zero", "2", "--offload", "none", "--precision", "bf16")


def test_the_recorded_gpt2_run_is_predicted_to_the_byte() -> None:
    words = "estimate gpt2 --gpu h200 --gpus 8 --micro-batch 4 --seq-len 1024 --zero 2 --checkpointing off --json"
    found = document(dstune(*words.split()))
    [row] = [
        row
        for row in found["data"]["estimates"]
        if (row["plan"]["precision"], row["plan"]["offload"]) == ("bf16", "none")
    ]
    rows = [json.loads(line) for line in (ROOT / "tests/data/measured/memory.jsonl").read_text().splitlines()]
    [recorded] = [recorded for recorded in rows if recorded["name"] == "gpt2-z2-bf16-w8"]
    assert row["gpu"]["peak_allocated_bytes"] == recorded["peak_allocated"]
    assert row["gpu"]["peak_reserved_bytes"] == recorded["peak_reserved"]
    assert [phase["name"] for phase in row["gpu"]["phases"]] == [phase["phase"] for phase in recorded["phases"]]
    assert set(row["plan"]) >= {
        "zero_stage", "offload", "precision", "micro_batch", "gradient_accumulation_steps", "seq_len",
        "activation_checkpointing", "world_size", "optimizer",
    }  # fmt: skip
    assert set(row["gpu"]) >= {
        "peak_allocated_bytes", "peak_reserved_bytes", "min_capacity_bytes", "overhead_bytes", "capacity_bytes",
        "fits", "peak_phase", "phases",
    }  # fmt: skip
    assert set(row["host"]) >= {"pinned_bytes", "pageable_bytes", "per_node_bytes"}


def test_the_whole_default_table(tiny: str) -> None:
    done = dstune("estimate", tiny, "--gpu", "24GiB", "--gpus", "4", "--seq-len", "64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if line[:1].isdigit() and ("fits" in line or "over" in line)]
    assert len(rows) == 24
    assert lines[-1].startswith("Next, a larger micro-batch: dstune estimate")
    assert lines[-2].startswith("Fits with the least communication")


def test_nothing_fits_says_by_how_much_and_exits_1(tiny: str) -> None:
    words = ("estimate", tiny, "--gpu", "900MiB", "--gpus", "2", "--micro-batch", "64", "--seq-len", "512", *ONE_ROW)
    done = dstune(*words)
    assert done.returncode == 1
    assert "over by" in done.stdout
    assert dstune(*words, "--exit-zero").returncode == 0
    [row] = document(dstune(*words, "--json"))["data"]["estimates"]
    assert row["gpu"]["fits"] is False
    assert row["gpu"]["min_capacity_bytes"] + row["gpu"]["overhead_bytes"] > row["gpu"]["capacity_bytes"]
    assert row["gpu"]["shortage"]["operation"].startswith("aten::")


def test_host_memory_decides_too(tiny: str) -> None:
    done = dstune(
        "estimate", tiny, "--gpu", "24GiB", "--gpus", "8", "--host-memory", "8GiB", "--seq-len", "64", *ONE_ROW
    )
    assert done.returncode == 1
    assert "host over by" in done.stdout


def test_a_ds_config_is_run_exactly_and_shown_first(tiny: str, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = ("estimate", tiny, "--gpu", "24GiB", "--gpus", "2", "--seq-len", "64", *ONE_ROW)
    found = document(dstune(*words, "--ds-config", str(tmp_path / "ds.json"), "--json"))["data"]["estimates"]
    assert len(found) == 2
    assert found[0]["plan"]["ds_config"] == config
    assert [phase["name"] for phase in found[0]["gpu"]["phases"] if phase["name"].startswith("fwd0")] == [
        "fwd0.0", "fwd0.1"
    ]  # fmt: skip
    assert found[1]["plan"]["ds_config"]["scheduler"] == config["scheduler"]
    assert found[1]["plan"]["zero_stage"] == 2


def test_a_plan_comes_back_as_it_went_out(tiny: str, tmp_path: Path) -> None:
    words = ("estimate", tiny, "--gpu", "24GiB", "--gpus", "2", "--seq-len", "64")
    [first] = document(dstune(*words, *ONE_ROW, "--json"))["data"]["estimates"]
    (tmp_path / "plan.json").write_text(json.dumps(first["plan"]))
    [again] = document(dstune(*words, "--plan", str(tmp_path / "plan.json"), "--json"))["data"]["estimates"]
    assert again["gpu"] == first["gpu"]


def test_a_config_that_deepspeed_refuses_gives_its_reason(tiny: str, tmp_path: Path) -> None:
    both = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    plan = {"zero_stage": 0, "ds_config": both, "seq_len": 64}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = dstune("estimate", tiny, "--gpu", "24GiB", "--plan", str(tmp_path / "plan.json"))
    assert done.returncode == 2
    assert "DeepSpeed refuses" in done.stderr
    assert "AssertionError" in done.stderr
    assert "Traceback" not in done.stderr
    assert (
        "Traceback"
        in dstune("--debug", "estimate", tiny, "--gpu", "24GiB", "--plan", str(tmp_path / "plan.json")).stderr
    )


def estimate_own(function: str) -> subprocess.CompletedProcess[str]:
    return dstune("estimate", f"tests.examples.own_model:{function}", "--gpu", "24GiB", "--micro-batch", "8", *ONE_ROW)


def test_the_documented_model_of_ones_own_runs() -> None:
    done = estimate_own("make")
    assert done.returncode == 0, done.stderr
    assert "12.6 M parameters" in done.stdout


def test_a_model_function_that_raises_shows_its_last_frames() -> None:
    done = estimate_own("broken")
    assert done.returncode == 3
    assert "FileNotFoundError: the checkpoint is not here" in done.stderr
    assert "own_model.py" in done.stderr


def test_a_fault_in_the_models_forward_is_the_models_not_deepspeeds() -> None:
    done = estimate_own("make_raising")
    assert done.returncode == 3
    assert "error: the model cannot be run" in done.stderr
    assert "own_model.py" in done.stderr


def test_a_shape_that_depends_on_data_is_an_error_that_names_operation_and_module() -> None:
    done = estimate_own("make_reading_values")
    assert done.returncode == 3
    assert "aten.index.Tensor" in done.stderr
    assert "module `ReadsValues`" in done.stderr


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_no_child_survives(tiny: str, kill: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dstune", "estimate", tiny, "--gpu", "24GiB", "--seq-len", "64"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as running:  # fmt: skip
        assert running.stdout is not None
        running.stdout.readline()  # the table has begun: forks are at work
        children = psutil.Process(running.pid).children(recursive=True)
        assert children
        running.send_signal(kill)
        assert running.wait(timeout=30) == (130 if kill is signal.SIGINT else -signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive


def test_a_mixture_of_experts_says_how_it_was_routed(tmp_path: Path) -> None:
    mixtral = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "num_local_experts": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    words = ("estimate", str(tmp_path), "--gpu", "h200", "--gpus", "2", "--seq-len", "64", *ONE_ROW, "--json")
    for routing in ("balanced", "worst"):
        found = document(dstune(*words, "--routing", routing))
        assert any(f"`{routing}`" in warning for warning in found["warnings"])
        assert found["data"]["estimates"][0]["gpu"]["fits"]


def test_the_largest_micro_batch_fits_and_one_more_does_not(tiny: str) -> None:
    words = ("estimate", tiny, "--gpu", "4GiB", "--seq-len", "256", *ONE_ROW, "--exit-zero", "--json")
    [found] = document(dstune(*words, "--micro-batch", "max"))["data"]["estimates"]
    largest = found["largest_micro_batch"]
    assert found["plan"]["micro_batch"] == largest > 1
    assert found["gpu"]["verdict"] == "fits"
    [over] = document(dstune(*words, "--micro-batch", str(largest + 1)))["data"]["estimates"]
    assert over["gpu"]["verdict"] != "fits"
    low, high = over["gpu"]["min_capacity_range_bytes"]
    assert low <= over["gpu"]["min_capacity_bytes"] <= high
    assert high + over["gpu"]["overhead_bytes"] > over["gpu"]["capacity_bytes"]


def test_frozen_parts_have_no_states(tiny: str) -> None:
    words = ("estimate", tiny, "--gpu", "24GiB", "--seq-len", "64", "--zero", "0", "--precision", "bf16", "--json")
    [whole] = document(dstune(*words))["data"]["estimates"]
    [part] = document(dstune(*words, "--freeze", "*mlp*,*embed*"))["data"]["estimates"]
    assert part["gpu"]["peak_allocated_bytes"] < whole["gpu"]["peak_allocated_bytes"]
    done = dstune(*words, "--freeze", "*nothing*")
    assert "no parameter is called `*nothing*`" in document(done)["errors"][0]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--micro-batch", "0"), "at least 1"),
        (("--micro-batch", "many"), "`many` is no value of --micro-batch"),
        (("--routing", "balanced,worst"), "takes one value"),
        (("--attention", "all"), "takes one value"),
        (("--optimizer", "torch.Adagrad"), "use one of torch.Adam,"),
        (("--gpus", "4", "--sequence-parallel", "3"), "does not divide the 4 GPUs"),
        (("--gpus", "4", "--sequence-parallel", "4", "--seq-len", "66"), "does not divide the 66 tokens"),
        (("--alloc-conf", "max_split_size_mb:1"), "too small"),
    ],
)
def test_words_that_mean_nothing_are_refused_at_once(words: tuple[str, ...], said: str) -> None:
    done = dstune("estimate", "gpt2", "--gpu", "24GiB", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_states_of_eight_bits_are_a_quarter_of_the_usual(tiny: str) -> None:
    words = ("estimate", tiny, "--gpu", "24GiB", "--seq-len", "64", "--zero", "1", "--precision", "bf16", *ONE_ROW[2:])
    [usual] = document(dstune(*words, "--optimizer", "torch.AdamW", "--json"))["data"]["estimates"]
    [small] = document(dstune(*words, "--optimizer", "bitsandbytes.AdamW8bit", "--json"))["data"]["estimates"]
    before, after = (one["gpu"]["phases"][-1]["allocated_bytes"] for one in (usual, small))
    blocks = usual["num_parameters"] / 256
    assert before - after == pytest.approx(usual["num_parameters"] * (8 - 2) - 2 * 4 * blocks, rel=0.01)


def test_ranks_that_share_a_sequence_hold_a_part_of_it(tiny: str, tmp_path: Path) -> None:
    def forward_bytes(*words: str) -> int:
        done = dstune("estimate", tiny, "--gpu", "24GiB", "--gpus", "4", "--zero", "2", *ONE_ROW[2:], *words, "--json")
        phases = {one["name"]: one for one in document(done)["data"]["estimates"][0]["gpu"]["phases"]}
        return int(phases["fwd1.0"]["allocated_bytes"] - phases["step0.0"]["allocated_bytes"])

    whole, half = forward_bytes("--seq-len", "4096"), forward_bytes("--seq-len", "2048")
    assert forward_bytes("--seq-len", "4096", "--sequence-parallel", "2") == pytest.approx(half, rel=0.05)
    assert half < 0.6 * whole
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_batch_size": 4, "sequence_parallel_size": 2, "bf16": {"enabled": True}}))
    words = ("--gpu", "24GiB", "--gpus", "4", "--seq-len", "64", *ONE_ROW, "--ds-config", str(config), "--json")
    first, second = document(dstune("estimate", tiny, *words))["data"]["estimates"]
    assert (first["plan"]["micro_batch"], second["plan"]["sequence_parallel_size"]) == (2, 2)


def test_a_model_whose_sequences_cannot_be_shared_is_named() -> None:
    done = dstune("estimate", "gpt2", "--gpu", "24GiB", "--gpus", "2", *ONE_ROW, "--sequence-parallel", "2")
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "cannot share the sequences of `GPT2LMHeadModel`" in done.stderr


def test_the_next_command_trains_as_this_one_does(tiny: str) -> None:
    words = ("--optimizer", "torch.SGD", "--accumulation", "2", "--freeze", "*embed*", "--host-memory", "64GiB")
    done = dstune("estimate", tiny, "--gpu", "24GiB", "--seq-len", "64", *ONE_ROW, *words)
    following = shlex.split(done.stdout.splitlines()[-1].partition(": ")[2])
    asked = dict(zip(words[::2], words[1::2], strict=True)) | {"--micro-batch": "2"}
    assert asked.items() <= dict(zip(following[3::2], following[4::2], strict=True)).items()
    assert dstune(*following[1:]).returncode == 0


def test_experts_of_deepspeed_moe_are_spread_over_the_ranks() -> None:
    words = ("--gpu", "24GiB", "--gpus", "4", "--seq-len", "64", *ONE_ROW, "--json")
    needed = {}
    for name in ("spread", "alone"):
        [found] = document(dstune("estimate", f"tests.examples.moe_model:{name}", *words, cwd=ROOT))["data"][
            "estimates"
        ]
        needed[name] = found["gpu"]["phases"][0]["allocated_bytes"], found["num_parameters"]
    assert needed["spread"][1] < needed["alone"][1]


def test_nvme_offload_touches_no_disk(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "nvme"), "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    words = ("--gpu", "24GiB", "--gpus", "2", "--seq-len", "64", "--ds-config", str(tmp_path / "ds_config.json"))
    first = document(dstune("estimate", "gpt2", *words, "--zero", "3", "--precision", "bf16", "--json"))["data"]
    host = first["estimates"][0]["host"]
    assert host["disk_bytes"] > 0
    assert host["pinned_bytes"] > 0
    assert not (tmp_path / "nvme").exists()


def test_a_compiled_model_is_refused() -> None:
    words = ("--gpu", "24GiB", "--seq-len", "64", *ONE_ROW, "--json")
    done = dstune("estimate", "tests.examples.own_model:make_compiled", *words, cwd=ROOT)
    assert "torch.compile is not supported" in document(done)["errors"][0]["message"]


def test_a_file_without_an_optimizer_gets_the_one_a_trainer_brings(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    path.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero})
    )
    words = ("--gpu", "24GiB", "--zero", "1,2", "--offload", "all", "--precision", "bf16", "--seq-len", "32", "--json")
    found = document(dstune("estimate", str(tiny), *words, "--ds-config", str(path)))["data"]
    assert found["refused"] == []
    first, *others = found["estimates"]
    assert "CPU" in first["optimizer"]
    same = [one for one in others if (one["plan"]["zero_stage"], one["plan"]["offload"]) == (2, "optimizer")]
    assert [one["gpu"] for one in same] == [first["gpu"]]
