"""Findings of the linter, for people and for machines: text, GitHub annotations, SARIF, markdown."""

import json
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from dstune import __version__
from dstune.errors import ExitCode
from dstune.lint.finding import Finding
from dstune.lint.inspection import EXTRA_RULES
from dstune.lint.rule import Severity
from dstune.lint.rules import RULES
from dstune.report.machine import envelope

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
"""https://docs.github.com/actions/reference/workflow-commands-for-github-actions"""


class Format(StrEnum):
    """How findings are shown."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"
    MARKDOWN = "markdown"


def as_text(findings: Sequence[Finding], num_files: int, num_fixed: int) -> str:
    """One line a finding, as compilers write them, then the sum."""
    lines = [f"{one.file}:{one.line}:{one.column}: {one.severity}: {one.text} [{one.rule}]" for one in findings]
    return "\n".join([*lines, summary(findings, num_files, num_fixed)])


def summary(findings: Sequence[Finding], num_files: int, num_fixed: int) -> str:
    """The last line: what to think of it, and what to do next."""
    files = f"{num_files} file{'s' * (num_files != 1)}"
    fixed = f"{num_fixed} fixed; " if num_fixed else ""
    if not findings:
        return f"{fixed}{files}: nothing found"
    counts = Counter(one.severity for one in findings)
    parts = [f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in Severity if counts[kind]]
    fixable = sum(one.fix is not None for one in findings)
    after = f"; {fixable} can be mended with --fix" if fixable else ""
    return f"{fixed}{files}: {', '.join(parts)}{after}"


def as_github(findings: Sequence[Finding]) -> str:
    """Workflow commands, which GitHub shows beside the lines."""
    return "\n".join(
        f"::{GITHUB_LEVELS[one.severity]} file={_property(one.file)},line={one.line},col={one.column},"
        f"title={_property(one.rule)}::{_data(one.text)}"
        for one in findings
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_markdown(findings: Sequence[Finding], num_files: int) -> str:
    """A table, as a job summary or a comment has it."""
    head = f"### dstune lint\n\n{summary(findings, num_files, 0)}\n"
    if not findings:
        return head
    rows = [f"| {_cell(one.file)}:{one.line} | {one.severity} | {_cell(one.text)} | `{one.rule}` |" for one in findings]
    return "\n".join([head, "| place | severity | finding | rule |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_json(findings: Sequence[Finding], num_files: int, num_fixed: int, code: ExitCode) -> str:
    """The envelope."""
    data = {"findings": [entry(one) for one in findings], "num_files": num_files, "num_fixed": num_fixed}
    return envelope("lint", code, data)


def entry(finding: Finding) -> dict[str, Any]:
    """One of `data.findings[]`."""
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "file": finding.file,
        "line": finding.line,
        "column": finding.column,
        "key": ".".join(finding.path),
        "message": finding.message,
        "suggestion": finding.suggestion or None,
        "is_fixable": finding.fix is not None,
        "fingerprint": finding.fingerprint,
    }


def as_sarif(findings: Sequence[Finding]) -> str:
    """SARIF 2.1.0, as code scanning reads it."""
    ids = list(dict.fromkeys(one.rule for one in findings))
    driver = {
        "name": "dstune",
        "version": __version__,
        "rules": [_sarif_rule(name) for name in ids],
    }
    results = [
        {
            "ruleId": one.rule,
            "ruleIndex": ids.index(one.rule),
            "level": one.severity.value,
            "message": {"text": one.text},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": PurePath(one.file).as_posix()},
                        "region": {"startLine": one.line, "startColumn": one.column},
                    }
                }
            ],
            "partialFingerprints": {"dstune/v1": one.fingerprint},
        }
        for one in findings
    ]
    document = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(document, indent=2)


def _sarif_rule(name: str) -> dict[str, Any]:
    rule = RULES.get(name)
    what = rule.what if rule else EXTRA_RULES[name]
    why = rule.why if rule else EXTRA_RULES[name]
    return {
        "id": name,
        "shortDescription": {"text": what},
        "help": {"text": why},
        "defaultConfiguration": {"level": rule.severity.value if rule else "error"},
    }
