"""What users write: models, GPUs, sizes, lists, ds_configs."""

import json
from pathlib import Path

import pytest

from dstune.cluster.catalogue import catalogue, find_gpu
from dstune.dsconfig.document import plan_of, read_ds_config, vary, without_auto
from dstune.errors import ConfigFileError, ModelError, UsageError
from dstune.estimator.grid import grid
from dstune.jsonfile import read_json
from dstune.model.presets import presets
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.units import GIB, count, parse_bytes
from dstune.vocab import Checkpointing, Offload, Precision

WANTED = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "tinyllama-1.1b",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-405b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen3-0.6b",
    "qwen3-8b",
    "gemma-2b",
    "phi-3-mini",
    "opt-1.3b",
    "pythia-1.4b",
    "bert-base",
    "bert-large",
    "t5-large",
    "vit-large",
]


def test_every_promised_preset_is_there_with_its_source() -> None:
    assert set(WANTED) == set(presets())
    assert all(preset.source and preset.config["model_type"] for preset in presets().values())


def test_the_catalogue_is_plausible() -> None:
    assert len(catalogue()) >= 25
    for gpu in catalogue().values():
        assert 8 * GIB < gpu.capacity_bytes < 300 * GIB
        assert gpu.source


@pytest.mark.parametrize("text", ["a100-80gb", "NVIDIA A100-SXM4-80GB", "A100 80GB"])
def test_a_gpu_has_many_spellings(text: str) -> None:
    assert find_gpu(text).name == "a100-80gb"


def test_an_alias_is_plain_and_an_ambiguous_name_is_asked_back() -> None:
    assert find_gpu("H100").name == "h100-80gb"
    with pytest.raises(UsageError) as caught:
        find_gpu("a100")
    assert "a100-80gb" in str(caught.value.hint)
    assert "a100-40gb" in str(caught.value.hint)


def test_a_size_is_a_gpu_too() -> None:
    assert find_gpu("24GiB").capacity_bytes == 24 * GIB


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu("a100-800gb")
    assert "a100-80gb" in str(caught.value.hint)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        resolve("lama-3-8b")
    assert "llama-3-8b" in str(caught.value.hint)


def test_a_folder_is_read_and_faults_are_placed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    spec = resolve(str(tmp_path))
    assert (spec.class_name, spec.config["model_type"]) == ("GPT2LMHeadModel", "gpt2")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2",\n "n_layer": }')
    with pytest.raises(ConfigFileError, match=r"config\.json:2:13"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigFileError, match="does not exist"):
        resolve(str(tmp_path))


def test_a_plan_that_is_no_text_is_placed_like_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        read_json(tmp_path / "plan.json", "")


def test_a_bare_encoder_gets_a_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaModel"]}))
    assert resolve(str(tmp_path)).class_name is None


def test_a_hub_id_offline_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        resolve("some-org/some-model")
    assert "config.json" in str(caught.value.hint)


def test_sizes() -> None:
    assert parse_bytes("80GiB") == parse_bytes("80g") == 80 * GIB
    assert count(8_030_261_248) == "8.03 B"
    for bad in ("-3GiB", "0GiB", "many", "3 apples"):
        with pytest.raises(UsageError):
            parse_bytes(bad)


def test_the_default_grid_has_24_rows() -> None:
    plans = grid(TrainingPlan(), (0, 1, 2, 3), tuple(Offload), tuple(Precision), (Checkpointing.OFF,), zero_init=True)
    assert len(plans) == 24
    assert len({plan.digest() for plan in plans}) == 24


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_ds_config_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    file = write(tmp_path / "ds.json", '{"train_batch_size": 32, // all\n "zero_optimization": {"stage": 2,}}')
    config = read_ds_config(file)
    plan = plan_of(config, TrainingPlan(world_size=4))
    assert (plan.zero_stage, plan.micro_batch, plan.precision) == (2, 8, Precision.FP32)
    assert plan.ds_config == config


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1,\n "b": [1, 2}', r"ds\.json:2"),
        ('{"a": 1,\n\n"a": 2}', r"ds\.json:3: `a` is given twice"),
        ("[1]", "1"),
    ],
)
def test_a_broken_ds_config_is_placed(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigFileError, match=place):
        read_ds_config(write(tmp_path / "ds.json", text))


def test_batch_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="does not divide"):
        plan_of({"train_batch_size": 30}, TrainingPlan(world_size=4))


def test_auto_is_filled_in_or_left_to_deepspeed() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    filled = without_auto(config, TrainingPlan(micro_batch=6), hidden_size=1024)
    assert filled["train_micro_batch_size_per_gpu"] == 6
    assert filled["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1024 * 1024}
    assert filled["optimizer"] == {"type": "AdamW", "params": {}}


def test_variations_keep_every_other_key() -> None:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR"},
    }
    plan = vary(config, TrainingPlan(zero_stage=3, precision=Precision.FP16, micro_batch=2)).ds_config
    assert plan is not None
    assert plan["zero_optimization"] == {"reduce_bucket_size": 7, "stage": 3}
    assert plan["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert plan["scheduler"] == {"type": "WarmupLR"}
    assert plan["train_micro_batch_size_per_gpu"] == 2
