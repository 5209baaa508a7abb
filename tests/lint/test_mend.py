"""Fixes take away their finding, and nothing else: comments, order and other keys stay."""

import json
import subprocess
import sys

import pytest

from dstune.lint.document import Document, parse_document
from dstune.lint.inspection import Selection, inspect
from dstune.lint.mend import mend
from dstune.lint.rule import Remove, Rule
from dstune.lint.rules import RULES

FIXABLE = [pytest.param(rule, id=rule.id) for rule in RULES.values() if rule.is_fixable]


def commented(text: str) -> str:
    """A comment above each line and behind each brace."""
    lines = text.splitlines()
    return "\n".join(f"{line}\n# after {number}" for number, line in enumerate(lines)) + "\n"


def comments(document: Document, *removed: tuple[str, ...]) -> list[str]:
    """All but those inside a member that is to go."""
    assert document.syntax is not None
    spans = [(member.start, member.node.end) for path in removed if (member := document.member(path))]
    return [one.text for one in document.syntax.comments if not any(start < one.start < end for start, end in spans)]


@pytest.mark.parametrize("rule", FIXABLE)
def test_a_fix_takes_the_finding_away_and_keeps_the_rest(rule: Rule) -> None:
    for text in (rule.bad, commented(rule.bad), json.dumps(json.loads(rule.bad))):
        before = parse_document("x", text)
        after, gone = mend(before, rule.surroundings, Selection(select=(rule.id,)))
        assert gone
        assert after.fault is None
        assert inspect(after, rule.surroundings, Selection(select=(rule.id,))) == []
        assert comments(after) == comments(before, *(one.path for one in gone if one.fix == Remove()))
        others = [key for key in before.config if key not in {path for one in gone for path in one.path}]
        assert [key for key in after.config if key in others] == others
        if "#" not in text:
            json.loads(after.text)


def test_deepspeed_reads_the_mended_file_as_it_read_the_old_one() -> None:
    old = '{"train_batch_size": 4, "zero_optimization": {"stage": 2, "cpu_offload": true}}'
    new, _ = mend(parse_document("x", old), RULES["deprecated-cpu-offload"].surroundings, Selection())
    code = (
        "import os, sys, json; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "made = [DeepSpeedConfig(json.loads(text)).zero_config.offload_optimizer.device for text in sys.argv[1:]]\n"
        "assert str(made[0]) == str(made[1]) == 'cpu', made\n"
    )
    subprocess.run([sys.executable, "-c", code, old, new.text], check=True, capture_output=True)


def test_a_key_that_follows_a_removed_last_one_keeps_its_comma() -> None:
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 1, "sub_group_size": 5}, "steps_per_print": 1}'
    mended, _ = mend(parse_document("x", text), RULES["sub-group-size-below-stage-3"].surroundings, Selection())
    assert json.loads(mended.text) == {
        "train_batch_size": 8, "zero_optimization": {"stage": 1}, "steps_per_print": 1,
    }  # fmt: skip
