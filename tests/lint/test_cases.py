"""Real mistakes from public threads, and configs of the shapes that public projects ship: what is found, and no more.

Each expectation was written down after looking whether it is true; DeepSpeed's own parser is asked besides.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dstune.lint.document import Document, parse_document
from dstune.lint.inspection import Selection, inspect
from dstune.lint.rule import Deed, Problem, Severity, Surroundings
from dstune.lint.rules import RULES
from dstune.lint.validation import refusals

DATA = Path(__file__).parents[1] / "data" / "lint"
MISTAKES = json.loads((DATA / "mistakes.json").read_text())
PUBLIC = json.loads((DATA / "public.json").read_text())
JUDGED_WITHOUT_DEEPSPEED = {
    "syntax-error",
    "no-batch-size",
    "duplicate-key",
    "auto-batch-needs-trainer",
    "bound-to-world-size",
}
"""What depends on the text, a trainer or the number of ranks, which the parser is spared."""


def surroundings(case: dict[str, Any]) -> Surroundings:
    gpu = case.get("gpu")
    return Surroundings(case.get("world_size"), None if gpu is None else (gpu[0], tuple(gpu[1])))


def found(case: dict[str, Any]) -> list[str]:
    document = parse_document("ds_config.json", case["text"])
    return [f"{one.rule}:{one.line}" for one in inspect(document, surroundings(case), Selection())]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case["what"])
def test_a_mistake_is_found_and_nothing_besides(case: dict[str, Any]) -> None:
    assert found(case) == case["expected"]
    assert case["expected"]


@pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case["name"])
def test_a_public_config_gives_what_was_found_true(case: dict[str, Any]) -> None:
    assert found(case) == case["expected"]


def test_there_are_enough_of_both() -> None:
    threads = {case["thread"] for case in MISTAKES if case["thread"].startswith("https://")}
    assert len(threads) >= 30
    assert len(PUBLIC) >= 40


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Problem | None]:
    """DeepSpeed's own answer to each text that can be read."""
    texts = {case["text"] for case in (*MISTAKES, *PUBLIC)}
    documents: list[Document] = [parse_document("x", text) for text in sorted(texts)]
    readable = [document for document in documents if document.fault is None]
    return {document.text: answer for document, answer in zip(readable, refusals(readable), strict=True)}


@pytest.mark.parametrize("case", [*MISTAKES, *PUBLIC], ids=lambda case: case.get("name", case.get("what")))
def test_an_error_is_an_error_to_deepspeed_too(case: dict[str, Any], verdicts: dict[str, Problem | None]) -> None:
    ids = {name.split(":")[0] for name in case["expected"]} - JUDGED_WITHOUT_DEEPSPEED
    refusing = {name for name in ids if RULES[name].deed is Deed.REFUSES and RULES[name].severity is Severity.ERROR}
    answer = verdicts.get(case["text"])
    if case.get("name") == "ax-zero1-torch-compile":
        assert answer is not None
        assert answer.path == ("compile", "disable")
    elif "batch-arithmetic" not in refusing and case["text"] in verdicts:
        assert (answer is not None) is bool(refusing), answer
