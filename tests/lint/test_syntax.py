"""The scanner gives hjson's values, and the place of each."""

import json
from typing import Any

import hjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstune.lint.document import parse_document
from dstune.lint.syntax import SyntaxFaultError, scan

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
CONFIGS = st.dictionaries(st.text(max_size=8), VALUES, max_size=5)
LOOSE = [
    '{"a": 1, // one\n "b": 2,}',
    "{a: 1, b: text without quotes\n c: true}",
    "# first\n{'a': 'x', /* in\nbetween */ \"b\": [1, 2,\n 3,]}",
    "a: 1\nb: {c: null}",
    '{"a": """" }',
    "{a: '''\nmany\nlines\n''', b: 1e8}",
    '{"a": -1.5e-3, "b": "\\u00e9\\n",}',
    "{a: 5 # five\n b: 07\n c: 1x\n}",
]


@given(CONFIGS)
def test_json_is_read_as_the_library_reads_it(config: dict[str, Any]) -> None:
    for text in (json.dumps(config), json.dumps(config, indent=2), json.dumps(config, indent=2, ensure_ascii=False)):
        scanned = scan(text)
        assert scanned.root.to_python() == json.loads(text)
        assert scanned.loose_at is None


@given(CONFIGS)
def test_every_key_stands_where_it_is_said(config: dict[str, Any]) -> None:
    text = json.dumps(config, indent=2)
    for node in scan(text).root.walk():
        for member in node.members:
            assert json.loads(text[member.start : member.end]) == member.key
            assert json.loads(text[member.node.start : member.node.end]) == member.node.to_python()


@pytest.mark.parametrize("text", LOOSE)
def test_loose_syntax_is_read_as_hjson_reads_it(text: str) -> None:
    try:
        expected = dict(hjson.loads(text))
    except hjson.HjsonDecodeError:
        assert parse_document("x", text).fault is not None
        return
    document = parse_document("x", text)
    assert document.config == expected
    assert document.syntax is not None
    assert document.syntax.loose_at is not None


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('{\n  "a": 1\n', 3, 1),
        ("hello", 1, 6),
        ('{"a": [1, 2}', 1, 12),
        ('{\n "a": 1,\n "b" 2}', 3, 6),
        ("", 1, 1),
        ("[1]", 1, 1),
    ],
)
def test_a_fault_has_its_place(text: str, line: int, column: int) -> None:
    document = parse_document("x", text)
    assert document.fault is not None
    place = document.place(document.fault[1])
    assert (place.line, place.column) == (line, column)


def test_ten_thousand_levels_are_refused_without_a_crash() -> None:
    with pytest.raises(SyntaxFaultError, match="too deeply"):
        scan('{"a":' * 10_000 + "1" + "}" * 10_000)
