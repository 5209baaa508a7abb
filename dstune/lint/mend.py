"""Safe fixes, written into the text: comments, order and layout stay."""

import json

from dstune.lint.document import Document, parse_document
from dstune.lint.finding import Finding
from dstune.lint.inspection import Selection, inspect
from dstune.lint.rule import Remove, Rename, Replace, Surroundings
from dstune.lint.syntax import Member

MAX_ROUNDS = 20
"""One fix can make another possible."""


def mend(document: Document, around: Surroundings, selection: Selection) -> tuple[Document, list[Finding]]:
    """Fix all that is safe.

    Returns:
        The document as it is then, and the findings that are gone.
    """
    mended: list[Finding] = []
    for _ in range(MAX_ROUNDS):
        fixable = [one for one in inspect(document, around, selection) if one.fix is not None]
        target = next((one for one in fixable if document.member(one.path) is not None), None)
        if target is None:
            return document, mended
        document = parse_document(document.name, _apply(document, target))
        mended.append(target)
    return document, mended


def _apply(document: Document, finding: Finding) -> str:
    member = document.member(finding.path)
    assert member is not None
    text = document.text
    match finding.fix:
        case Rename(key):
            return _splice(text, member.start, member.end, json.dumps(key))
        case Replace(value, key):
            made = _splice(text, member.node.start, member.node.end, _dump(value, _indent(text, member.start)))
            return made if key is None else _splice(made, member.start, member.end, json.dumps(key))
        case Remove():
            return _without(text, member)
    return text


def _splice(text: str, start: int, end: int, inside: str) -> str:
    return text[:start] + inside + text[end:]


def _dump(value: object, indent: str) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n" + indent)


def _indent(text: str, offset: int) -> str:
    line = text[text.rfind("\n", 0, offset) + 1 : offset]
    return line[: len(line) - len(line.lstrip())]


def _without(text: str, member: Member) -> str:
    """Take a member out, with one comma: the one after it, or for the last member the one before."""
    start, end = member.start, member.node.end
    after = _skip_blank(text, end)
    if text[after : after + 1] == ",":
        end = after + 1
        rest = text[end : _line_end(text, end)]
        if not rest.strip():
            end = min(_line_end(text, end) + 1, len(text))
            line_start = text.rfind("\n", 0, start) + 1
            return text[:line_start] + text[end:] if not text[line_start:start].strip() else text[:start] + text[end:]
        return text[:start] + text[_skip_blank(text, end) :]
    before = len(text[:start].rstrip())
    if text[before - 1 : before] == ",":
        return text[: before - 1] + text[end:]
    line_start = text.rfind("\n", 0, start) + 1
    is_alone = not text[line_start:start].strip() and not text[end : _line_end(text, end)].strip()
    return text[:line_start] + text[_line_end(text, end) + 1 :] if is_alone else text[:start] + text[end:]


def _skip_blank(text: str, offset: int) -> int:
    while text[offset : offset + 1] in {" ", "\t", "\n", "\r"} and offset < len(text):
        offset += 1
    return offset


def _line_end(text: str, offset: int) -> int:
    end = text.find("\n", offset)
    return len(text) if end < 0 else end
