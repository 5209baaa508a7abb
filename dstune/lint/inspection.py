"""Rules applied to files: which ones, and which of their findings count."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dstune.errors import UsageError
from dstune.lint.document import Document
from dstune.lint.finding import Finding, finding_of
from dstune.lint.rule import Case, Problem, Severity, Surroundings
from dstune.lint.rules import RULES

DEEPSPEED = "deepspeed-refuses"
"""Findings of DeepSpeed's own validation."""
DOES_NOT_FIT = "does-not-fit"
"""Findings of the estimate, with `--model` and `--gpu`."""
EXTRA_RULES = {
    DEEPSPEED: "DeepSpeed's own parser, run on the file, refuses it for a reason that no other rule has found.",
    DOES_NOT_FIT: "The micro-batch does not fit on the GPU, as a step of the real DeepSpeed on the virtual GPU shows.",
}
"""Rules without a row: they have no examples, since they run something."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rules count.

    Attributes:
        select: Ids or beginnings of ids; empty for all.
        ignore: The same, taken out.
        baseline: Fingerprints of findings that are known and accepted.
    """

    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    baseline: frozenset[str] = field(default_factory=frozenset)

    def check(self) -> None:
        """Raise UsageError for a name that no rule has."""
        names = [*RULES, *EXTRA_RULES]
        for given in (*self.select, *self.ignore):
            if not any(name.startswith(given) for name in names):
                near = difflib.get_close_matches(given, names, 1)
                hint = f"did you mean `{near[0]}`?" if near else "see them with `dstune lint --rules`"
                raise UsageError(f"`{given}` is no rule", hint=hint)

    def takes(self, rule: str) -> bool:
        """Whether a rule counts."""
        chosen = not self.select or any(rule.startswith(name) for name in self.select)
        return chosen and not any(rule.startswith(name) for name in self.ignore)


def inspect(document: Document, around: Surroundings, selection: Selection) -> list[Finding]:
    """All that the rules find in a file, by place. A file that cannot be read has that one finding."""
    case = Case(document, around)
    ids = ["syntax-error"] if document.fault is not None else list(RULES)
    found = [
        finding_of(rule, RULES[rule].severity, problem, document)
        for rule in ids
        if selection.takes(rule)
        for problem in RULES[rule].check(case)
    ]
    return sift(found, document, selection)


def report_extra(rule: str, problems: Iterable[Problem], document: Document, selection: Selection) -> list[Finding]:
    """Findings of something that was run."""
    found = [finding_of(rule, Severity.ERROR, problem, document) for problem in problems if selection.takes(rule)]
    return sift(found, document, selection)


def sift(found: Iterable[Finding], document: Document, selection: Selection) -> list[Finding]:
    """Without what a comment or the baseline accepts."""
    kept = (
        one
        for one in found
        if one.fingerprint not in selection.baseline and not document.is_ignored(one.rule, one.line)
    )
    return sorted(kept, key=lambda one: (one.line, one.column, one.rule))
