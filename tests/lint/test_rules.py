"""Every row says the truth: its examples give what they should, and DeepSpeed does with them what the row says."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstune.cluster import Cluster
from dstune.cluster.catalogue import find_gpu
from dstune.dsconfig.document import plan_of
from dstune.estimator import estimate_plans
from dstune.estimator.result import Estimate
from dstune.lint.document import parse_document
from dstune.lint.inspection import Selection
from dstune.lint.mend import mend
from dstune.lint.rule import Case, Deed, Remove, Rule
from dstune.lint.rules import RULES
from dstune.lint.rules.keys import known_keys
from dstune.lint.rules.optimizer import SCHEDULES, TORCH
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from tests.lint import harvest

ROWS = [pytest.param(rule, id=rule.id) for rule in RULES.values()]
ASKED = [pytest.param(rule, id=rule.id) for rule in RULES.values() if rule.deed is not Deed.NOT_ASKED]
SILENT = {
    name: rule
    for name, rule in RULES.items()
    if rule.is_fixable
    and rule.deed in {Deed.IGNORES, Deed.ACCEPTS}
    and all(one.fix == Remove() for one in rule.check(Case(parse_document("x", rule.bad), rule.surroundings)))
}
"""Rules that say a key has no effect, and take it out."""


def found_in(rule: Rule, text: str) -> list[Any]:
    return list(rule.check(Case(parse_document("ds_config.json", text), rule.surroundings)))


@pytest.mark.parametrize("rule", ROWS)
def test_the_bad_example_has_it_and_the_good_one_does_not(rule: Rule) -> None:
    assert found_in(rule, rule.bad)
    assert found_in(rule, rule.good) == []
    assert any(one.fix for one in found_in(rule, rule.bad)) is rule.is_fixable


def test_there_are_fifty_rules_with_names_that_last() -> None:
    assert len(RULES) >= 50
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) for name in RULES)
    assert all(rule.what and rule.why and rule.source for rule in RULES.values())


@pytest.fixture(scope="module")
def deeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the installed DeepSpeed did with every example."""
    out = tmp_path_factory.mktemp("deeds") / "deeds.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.lint.deeds", str(out)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made: dict[str, Any] = json.loads(out.read_text())
    return made


@pytest.mark.parametrize("rule", ASKED)
def test_deepspeed_does_what_the_row_says(rule: Rule, deeds: dict[str, Any]) -> None:
    bad, good = deeds[rule.id]["bad"], deeds[rule.id]["good"]
    if rule.id != "auto-not-replaced":
        assert (good["error"], good["trained"] or "") == ("", "")
    match rule.deed:
        case Deed.REFUSES:
            assert re.search(rule.says, bad["error"]), bad
            assert bad["error"]
        case Deed.WARNS:
            assert bad["error"] == ""
            assert any(re.search(rule.says, said) for said in bad["warnings"]), bad
        case Deed.ACCEPTS | Deed.IGNORES:
            assert (bad["error"], bad["warnings"]) == ("", [])
        case Deed.FAILS:
            assert bad["error"] == ""
            assert bad["trained"], "it trains"
            assert re.search(rule.says, bad["trained"]), bad


def without_it(rule: Rule) -> str:
    """The bad example with what is found taken out."""
    mended, _ = mend(parse_document("x", rule.bad), rule.surroundings, Selection(select=(rule.id,)))
    return mended.text


@pytest.fixture(scope="module")
def memories() -> dict[str, tuple[int, ...]]:
    """GPU and pinned host memory of a step with each text, by the virtual GPU."""
    texts = sorted({text for rule in SILENT.values() for text in (rule.bad, without_it(rule))})
    base = TrainingPlan(micro_batch=1, seq_len=32, world_size=8, ranks_per_node=8, attention_mask=None)
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    plans = [plan_of({**parse_document("x", text).config, **optimizer}, base) for text in texts]
    cluster = Cluster(gpu=find_gpu("h100"), num_nodes=1, gpus_per_node=8, host_bytes=None)
    found: dict[str, tuple[int, ...]] = {}
    for number, result in estimate_plans(plans, resolve("gpt2"), cluster):
        assert isinstance(result, Estimate), (texts[number], result)
        gpu = result.gpu
        found[texts[number]] = (gpu.peak_allocated_bytes, gpu.peak_reserved_bytes, result.host.pinned_bytes)
    return found


@pytest.mark.parametrize("name", SILENT)
def test_a_key_without_effect_changes_no_memory(name: str, memories: dict[str, tuple[int, ...]]) -> None:
    rule = SILENT[name]
    assert without_it(rule) != rule.bad
    assert memories[rule.bad] == memories[without_it(rule)]


def test_deepspeed_knows_the_keys_of_the_table_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "keys.json"
    code = f"from pathlib import Path; from tests.lint import harvest; Path({str(out)!r}).write_text(harvest.text())"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert json.loads(out.read_text()) == known_keys() == json.loads(harvest.TABLE.read_text())


def test_optimizers_and_schedules_are_those_of_the_installed_libraries() -> None:
    code = (
        "import os, sys; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "import inspect, json, torch; from deepspeed.runtime import lr_schedules as found\n"
        f"names = {list(SCHEDULES)!r}\n"
        "arguments = {n: sorted(inspect.signature(getattr(found, n).__init__).parameters) for n in names}\n"
        f"missing = [n for n in {TORCH!r} if not hasattr(torch.optim, n)]\n"
        "print('#', json.dumps([arguments, missing, sorted(found.VALID_LR_SCHEDULES)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    arguments, missing, valid = json.loads(done.stdout.rsplit("#", 1)[1])
    for name, known in SCHEDULES.items():
        assert set(arguments[name]) - {"self", "optimizer", "last_batch_iteration"} == known
    assert missing == []
    assert set(valid) == set(SCHEDULES)
