"""What users and scripts rely on: flags, JSON keys, exit statuses, clean streams, nothing heavy imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dstune.errors import ExitCode
from tests.contract.run import ROOT, document, dstune

FLAGS = [
    "--gpu",
    "--gpus",
    "--nodes",
    "--host-memory",
    "--zero",
    "--offload",
    "--precision",
    "--checkpointing",
    "--micro-batch",
    "--accumulation",
    "--seq-len",
    "--sequence-parallel",
    "--optimizer",
    "--attention",
    "--lora",
    "--zero-init",
    "--no-zero-init",
    "--alloc-conf",
    "--routing",
    "--ds-config",
    "--plan",
    "--trust-remote-code",
    "--jobs",
    "--cache",
    "--no-cache",
    "--exit-zero",
    "--freeze",
    "--json",
]
OTHER_FLAGS = {
    "search": [
        "--attention",
        "--axes",
        "--budget",
        "--cache",
        "--checkpointing",
        "--dry-run",
        "--emulate-world-size",
        "--global-batch",
        "--gpu",
        "--gpus",
        "--headroom",
        "--host-memory",
        "--hostfile",
        "--jobs",
        "--json",
        "--launcher",
        "--lora",
        "--max-trials",
        "--memory-cap",
        "--micro-batch",
        "--no-cache",
        "--no-zero-init",
        "--nodes",
        "--offload",
        "--optimizer",
        "--output",
        "--precision",
        "--restart",
        "--seq-len",
        "--sequence-parallel",
        "--steps",
        "--trial-timeout",
        "--trust-remote-code",
        "--zero",
        "--zero-init",
    ],
    "emit-config": [
        "--attention",
        "--base",
        "--check",
        "--checkpointing",
        "--diff",
        "--for",
        "--force",
        "--from-estimate",
        "--global-batch",
        "--gpu",
        "--gpus",
        "--host-memory",
        "--jobs",
        "--json",
        "--nodes",
        "--offload",
        "--optimizer",
        "--output",
        "--precision",
        "--seq-len",
        "--sequence-parallel",
        "--zero",
    ],
    "lint": [
        "--baseline",
        "--deepspeed",
        "--exit-zero",
        "--fix",
        "--format",
        "--gpu",
        "--gpus",
        "--ignore",
        "--isolated",
        "--json",
        "--model",
        "--no-deepspeed",
        "--rules",
        "--select",
        "--seq-len",
        "--world-size",
        "--write-baseline",
    ],
}
HEAVY = ("torch", "deepspeed", "transformers", "numpy")


def test_the_flags_are_those_we_decided_on() -> None:
    found = set(re.findall(r"--[a-z][a-z-]+", dstune("estimate", "--help", env={"COLUMNS": "200"}).stdout))
    assert set(FLAGS) == found - {"--help"}


@pytest.mark.parametrize("command", list(OTHER_FLAGS))
def test_the_flags_of_the_other_commands_are_those_we_decided_on(command: str) -> None:
    found = set(re.findall(r"--[a-z][a-z-]+", dstune(command, "--help", env={"COLUMNS": "200"}).stdout))
    assert set(OTHER_FLAGS[command]) == found - {"--help"}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["estimate", "--help"],
        ["estimate"],
        ["models"],
        ["nonsense"],
        ["lint", "tests/data/lint/public.json", "--no-deepspeed"],
        ["emit-config", "tests/data/studies/search-gpt2-medium-24gib.jsonl", "--output", "-"],
    ],
)
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    code = (
        "import sys; from dstune.cli import main; main(sys.argv[1:]); "
        f"sys.stderr.write('HEAVY=' + ','.join(m for m in {HEAVY!r} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.stderr.endswith("HEAVY="), done.stderr


def test_the_six_exit_statuses() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 130]


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (["gtp2", "--gpu", "h200"], 2, "`gtp2` is no model", "gpt2"),
        (["gpt2", "--gpu", "h2000"], 2, "`h2000` is no known GPU", "h200"),
        (["gpt2", "--gpu", "h200", "--gpus", "0"], 2, "--gpus 0 is impossible", "at least 1"),
        (["gpt2", "--gpu", "h200", "--micro-batch", "0"], 2, "--micro-batch 0 is impossible", "at least 1"),
        (["gpt2", "--gpu", "h200", "--micro-batch", "few"], 2, "`few` is no value of --micro-batch", "max"),
        (["gpt2", "--gpu", "h200", "--host-memory", "-4GiB"], 2, "host memory", "GiB"),
        (["gpt2", "--gpu", "h200", "--zero", "4"], 2, "`4` is no value of --zero", "0, 1, 2, 3"),
        (["gpt2", "--gpu", "h200", "--zero", "0", "--offload", "optimizer"], 2, "no effect", "ZeRO 1, 2 or 3"),
        (["gpt2", "--gpu", "v100-16gb", "--precision", "bf16"], 2, "has no bf16", "fp32"),
        (["gpt2", "--gpu", "h200", "--seq-len", "2048"], 2, "1024 positions", "at most 1024"),
        (["gpt2", "--gpu", "h200", "--ds-config", "missing.json"], 2, "cannot be read", ""),
        (["gpt2", "--gpu", "h200", "--lora", "16"], 2, "is no LoRA", "targets="),
        (["gpt2", "--gpu", "h200", "--alloc-conf", "nonsense:64"], 2, "nonsense", "expandable_segments"),
        (["gpt2"], 3, "no GPU here", "--gpu"),
        (["gpt2", "--nonsense"], 2, "no such option", "--help"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_one_hint_and_the_right_status(
    words: list[str], code: int, message: str, hint: str
) -> None:
    done = dstune("estimate", *words)
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    hints = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    assert hint in (hints[0] if hints else "")
    as_json = document(dstune("estimate", *words, "--json"))
    assert (as_json["status"], as_json["exit_code"]) == ("error", code)
    assert message in as_json["errors"][0]["message"]
    assert set(as_json) == {"schema", "dstune", "command", "status", "exit_code", "data", "warnings", "errors"}


def test_models_and_gpus_are_listed_whole() -> None:
    assert "llama-3.1-405b" in dstune("models").stdout
    assert "rtx-4090" in dstune("gpus").stdout
    assert len(document(dstune("gpus", "--json"))["data"]["gpus"]) >= 25
    assert len(document(dstune("models", "--json"))["data"]["models"]) >= 30


def test_a_malformed_config_json_is_placed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{\n  oops\n}")
    done = dstune("estimate", str(tmp_path), "--gpu", "h200")
    assert done.returncode == 2
    assert re.search(r"config\.json:2:3", done.stderr)
