"""`dstune lint` as users and CI run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstune.errors import ExitCode
from tests.contract.run import document, dstune

GOOD = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}\n'
BAD = """{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "overlap_com": true,
    "offload_param": {"device": "cpu"} # from the guide
  }
}
"""


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(BAD)
    return path


def rules(done_stdout: str) -> list[str]:
    return [line.rsplit("[", 1)[1].rstrip("]") for line in done_stdout.splitlines() if line.endswith("]")]


def test_a_clean_file_is_said_to_be_clean(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(GOOD)
    done = dstune("lint", "a.json", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.OK, "1 file: nothing found\n", "")


def test_findings_have_a_place_and_status_one(bad: Path) -> None:
    done = dstune("lint", bad.name, cwd=bad.parent)
    assert done.returncode == ExitCode.NEGATIVE
    assert "ds_config.json:6:5: error: " in done.stdout
    assert "did you mean `overlap_comm`?" in done.stdout
    assert set(rules(done.stdout)) == {"refused-key", "offload-param-below-stage-3", "not-strict-json"}
    assert dstune("lint", bad.name, "--exit-zero", cwd=bad.parent).returncode == ExitCode.OK


def test_what_only_deepspeed_knows_is_found(tmp_path: Path) -> None:
    text = GOOD.replace('"stage": 2', '"stage": 2, "reduce_bucket_size": "big"')
    (tmp_path / "a.json").write_text(text)
    done = dstune("lint", "a.json", "--json", cwd=tmp_path)
    [finding] = document(done)["data"]["findings"]
    assert (finding["rule"], finding["key"]) == ("deepspeed-refuses", "zero_optimization.reduce_bucket_size")
    assert dstune("lint", "a.json", "--no-deepspeed", cwd=tmp_path).returncode == ExitCode.OK


def test_fix_keeps_the_rest_and_says_what_is_left(bad: Path) -> None:
    done = dstune("lint", bad.name, "--fix", "--no-deepspeed", cwd=bad.parent)
    assert done.returncode == ExitCode.NEGATIVE
    assert bad.read_text() == BAD.replace('true,\n    "offload_param": {"device": "cpu"}', "true")
    assert rules(done.stdout) == ["refused-key", "not-strict-json"]


def test_comments_settings_and_flags_choose_the_rules(bad: Path) -> None:
    bad.write_text(BAD.replace("# from the guide", "# dstune: ignore[offload-param-below-stage-3]"))
    words = ("lint", bad.name, "--no-deepspeed", "--ignore", "not-strict")
    assert rules(dstune(*words, cwd=bad.parent).stdout) == ["refused-key"]
    (bad.parent / "pyproject.toml").write_text('[tool.dstune.lint]\nignore = ["refused-key", "not-strict-json"]\n')
    assert dstune("lint", bad.name, "--no-deepspeed", cwd=bad.parent).returncode == ExitCode.OK
    assert rules(dstune("lint", bad.name, "--isolated", "--no-deepspeed", cwd=bad.parent).stdout)
    done = dstune("lint", bad.name, "--select", "unknown", "--no-deepspeed", cwd=bad.parent)
    assert done.returncode == ExitCode.OK
    (bad.parent / "pyproject.toml").write_text("[tool.dstune.lint]\nignored = []\n")
    done = dstune("lint", bad.name, cwd=bad.parent)
    assert done.returncode == ExitCode.USAGE
    assert "did you mean `ignore`?" in done.stderr


def test_a_baseline_accepts_what_is_there_and_not_what_comes(bad: Path) -> None:
    words = ("lint", bad.name, "--no-deepspeed", "--baseline", "base.json")
    assert dstune(*words, cwd=bad.parent).returncode == ExitCode.USAGE
    assert dstune(*words, "--write-baseline", cwd=bad.parent).returncode == ExitCode.OK
    assert dstune(*words, cwd=bad.parent).returncode == ExitCode.OK
    bad.write_text("\n" + BAD.replace('"stage": 2,', '"stage": 2, "legacy_stage1": true,'))
    assert rules(dstune(*words, cwd=bad.parent).stdout) == ["legacy-stage1"]


def test_sarif_is_what_code_scanning_reads_and_never_fails(bad: Path) -> None:
    done = dstune("lint", bad.name, "--format", "sarif", cwd=bad.parent)
    assert done.returncode == ExitCode.OK
    log = json.loads(done.stdout)
    [run] = log["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert log["version"] == "2.1.0"
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == bad.name
        assert place["region"]["startLine"] >= 1
        assert result["partialFingerprints"]


def test_in_a_github_workflow_lines_are_annotated_and_the_job_has_a_summary(bad: Path) -> None:
    summary = bad.parent / "summary.md"
    env = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    done = dstune("lint", bad.name, "--no-deepspeed", env=env, cwd=bad.parent)
    assert done.returncode == ExitCode.NEGATIVE
    assert "::error file=ds_config.json,line=6,col=5,title=refused-key::" in done.stdout
    assert "| ds_config.json:6 | error |" in summary.read_text()


def test_world_size_and_model_make_more_of_it(tmp_path: Path) -> None:
    text = GOOD.replace('_per_gpu": 1', '_per_gpu": 64').replace("{", '{"train_batch_size": 512,', 1)
    (tmp_path / "a.json").write_text(text)
    assert "works for world sizes that divide 8" in dstune("lint", "a.json", "--no-deepspeed", cwd=tmp_path).stdout
    done = dstune("lint", "a.json", "--no-deepspeed", "--world-size", "3", cwd=tmp_path)
    assert rules(done.stdout) == ["batch-arithmetic"]
    done = dstune("lint", "a.json", "--model", "gpt2", "--gpu", "24GiB", "--gpus", "8", "--no-deepspeed", cwd=tmp_path)
    assert done.returncode == ExitCode.NEGATIVE
    assert "micro-batch 64 does not fit" in done.stdout


def test_ranks_that_share_a_sequence_count_once(tmp_path: Path) -> None:
    sizes = '{"train_batch_size": 16, "gradient_accumulation_steps": 4, "sequence_parallel_size": 2,'
    (tmp_path / "a.json").write_text(GOOD.replace("{", sizes, 1))
    done = dstune("lint", "a.json", "--no-deepspeed", "--world-size", "8", cwd=tmp_path)
    assert rules(done.stdout) == []
    done = dstune("lint", "a.json", "--no-deepspeed", "--world-size", "16", cwd=tmp_path)
    assert rules(done.stdout) == ["batch-arithmetic"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1,\n "b": [1, 2\n', "3:1: error: "),
        (b"\xff\xfe{}", "1:1: error: byte 0 is no UTF-8"),
        (b"", "1:1: error: the file is empty"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b" " * 100_000_000, "95.4 MiB are too many for a ds_config"),
    ],
    ids=["torn", "no-text", "empty", "deep", "huge"],
)
def test_a_file_that_is_none_is_one_clear_error_and_others_are_read(text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "b.json").write_text(GOOD)
    done = dstune("lint", "a.json", "b.json", cwd=tmp_path)
    assert done.returncode == ExitCode.NEGATIVE
    assert said in done.stdout
    assert done.stdout.endswith("2 files: 1 error\n")
    assert done.stderr == ""


def test_wrong_use_says_what_to_do(bad: Path) -> None:
    for words, said in (
        (("nothing.json",), "check the path"),
        ((), "dstune lint ds_config.json"),
        ((bad.name, "--select", "unknown-kye"), "did you mean `unknown-key`?"),
        ((bad.name, "--world-size", "0"), "at least 1"),
        ((bad.name, "--write-baseline"), "--baseline"),
    ):
        done = dstune("lint", *words, cwd=bad.parent)
        assert done.returncode == ExitCode.USAGE
        assert said in done.stderr


LIMITED = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    "from dstune.cli import main; sys.exit(main(sys.argv[1:]))"
)
"""No file may grow: what a full disk does to a writer."""


def test_fix_on_a_full_disk_is_one_error_and_loses_nothing(bad: Path) -> None:
    words = [sys.executable, "-c", LIMITED, "lint", str(bad), "--fix", "--no-deepspeed"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "cannot be written" in done.stderr
    assert bad.read_text() == BAD
    assert [path.name for path in bad.parent.iterdir()] == [bad.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_fix_in_a_read_only_folder_is_one_error_and_loses_nothing(bad: Path) -> None:
    bad.parent.chmod(0o555)
    done = dstune("lint", str(bad), "--fix", "--no-deepspeed")
    bad.parent.chmod(0o755)
    assert done.returncode == ExitCode.ENVIRONMENT
    assert bad.read_text() == BAD
