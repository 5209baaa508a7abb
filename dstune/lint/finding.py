"""What the linter reports: a rule, a place, a sentence."""

import hashlib
from dataclasses import dataclass

from dstune.lint.document import Document, KeyPath
from dstune.lint.rule import Fix, Problem, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a file.

    Attributes:
        rule: Its id.
        severity: How bad it is.
        file: As the user named it.
        line: From 1.
        column: From 1.
        path: Keys from the top to the place.
        message: One lower-case sentence.
        suggestion: What was perhaps meant.
        fix: What `--fix` would do.
    """

    rule: str
    severity: Severity
    file: str
    line: int
    column: int
    path: KeyPath
    message: str
    suggestion: str = ""
    fix: Fix | None = None

    @property
    def text(self) -> str:
        """The sentence with its suggestion."""
        return f"{self.message} (did you mean `{self.suggestion}`?)" if self.suggestion else self.message

    @property
    def fingerprint(self) -> str:
        """The same while the finding is the same, wherever the line moves; of a baseline and of SARIF."""
        content = "\n".join((self.rule, self.file, ".".join(self.path), self.message))
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def finding_of(rule: str, severity: Severity, problem: Problem, document: Document) -> Finding:
    """Give a problem its place."""
    place = document.place(problem.offset) if problem.offset is not None else document.place_of(problem.path)
    return Finding(
        rule,
        severity,
        document.name,
        place.line,
        place.column,
        problem.path,
        problem.message,
        problem.suggestion,
        problem.fix,
    )
