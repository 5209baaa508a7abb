"""The generated pages are those of the rules, and the examples for CI are real."""

import re
import tomllib
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from dstune.lint.settings import Settings
from dstune.report.rulepages import pages
from tests.contract.run import ROOT, dstune

RULES = ROOT / "docs" / "reference" / "rules"
CI = (ROOT / "docs" / "how-to" / "ci.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", CI, re.DOTALL)


def test_each_rule_has_its_page_and_no_page_is_left_over() -> None:
    assert {path.name: path.read_text() for path in RULES.iterdir()} == pages()


def test_the_workflow_parses_and_its_commands_have_these_flags() -> None:
    workflow = yaml.safe_load(blocks("yaml")[0])
    steps = [step["run"] for step in workflow["jobs"]["lint"]["steps"] if "run" in step]
    commands = [step for step in steps if step.startswith("dstune")]
    assert len(commands) == 2
    for command in commands:
        help_text = dstune(command.split()[1], "--help", env={"COLUMNS": "200"}).stdout
        assert all(flag in help_text for flag in re.findall(r"--[a-z-]+", command))


def test_the_hook_of_the_example_exists_and_catches_usual_names() -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    example = yaml.safe_load(blocks("yaml")[2])
    assert example["repos"][0]["hooks"][0]["id"] == hook["id"]
    for name in ("ds_config.json", "configs/deepspeed_z3.json", "a/zero2.json"):
        assert re.search(hook["files"], name)
    assert not re.search(hook["files"], "package.json")
    assert dstune(*hook["entry"].split()[1:], "--help").returncode == 0


def test_the_settings_of_the_example_are_known() -> None:
    table = tomllib.loads(blocks("toml")[0])["tool"]["dstune"]["lint"]
    assert {key.replace("-", "_") for key in table} <= set(Settings.__dataclass_fields__)
    assert Path(table["baseline"]).suffix == ".json"
