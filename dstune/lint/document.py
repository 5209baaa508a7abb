"""One file to be linted: its text, its values, the place of each, and what its comments ask for."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import hjson

from dstune.errors import ConfigFileError
from dstune.lint.syntax import Comment, Member, Node, Syntax, SyntaxFaultError, scan
from dstune.units import MIB

MAX_BYTES = MIB
"""Of a file; the longest ds_config in public has 20 KiB."""
IGNORE = re.compile(r"dstune:\s*ignore(?P<file>-file)?\s*(\[(?P<rules>[^\]]*)\])?")

KeyPath: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file, both counted from 1."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True)
class Document:
    """A ds_config's text, scanned.

    Attributes:
        name: As the user gave it.
        text: All of it.
        syntax: What stands where; None if the scanner could not follow what hjson reads.
        config: Its values.
        fault: Why it could not be read, and the offset, if so.
    """

    name: str
    text: str
    syntax: Syntax | None = None
    config: dict[str, Any] = field(default_factory=dict)
    fault: tuple[str, int] | None = None

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def place(self, offset: int) -> Place:
        """Line and column of an offset."""
        line = bisect_right(self._line_starts, offset)
        return Place(line, offset - self._line_starts[line - 1] + 1)

    def place_of(self, path: KeyPath) -> Place:
        """Where a key stands: the deepest part of the path that is there."""
        if self.syntax is None:
            return Place()
        for length in range(len(path), 0, -1):
            member = self.syntax.root.find(path[:length])
            if member is not None:
                return self.place(member.start)
        return self.place(self.syntax.root.start)

    def member(self, path: KeyPath) -> Member | None:
        """The key at a path, with its place."""
        return self.syntax.root.find(path) if self.syntax and path else None

    def is_ignored(self, rule: str, line: int) -> bool:
        """Whether a comment on the line, or alone on the line above, or one for the whole file says so."""
        for comment, match in self._ignores:
            rules = match["rules"]
            if rules is not None and rule not in {name.strip() for name in rules.split(",")}:
                continue
            at = self.place(comment.start)
            if match["file"] or at.line == line:
                return True
            alone = not self.text[self._line_starts[at.line - 1] : comment.start].strip()
            if alone and at.line + comment.text.count("\n") + 1 == line:
                return True
        return False

    @cached_property
    def _ignores(self) -> list[tuple[Comment, re.Match[str]]]:
        comments = self.syntax.comments if self.syntax else []
        return [(comment, match) for comment in comments if (match := IGNORE.search(comment.text))]

    @property
    def nodes(self) -> list[Node]:
        """All values."""
        return list(self.syntax.root.walk()) if self.syntax else []


def read_document(path: Path) -> Document:
    """Read a file; what is wrong with its syntax becomes the document's fault.

    Raises:
        ConfigFileError: It cannot be read at all.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            return Document(str(path), "", fault=(f"{size_bytes / MIB:.1f} MiB are too many for a ds_config", 0))
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigFileError(f"`{path}` cannot be read", hint="check the path", because=(reason,)) from error
    except UnicodeDecodeError as error:
        return Document(str(path), "", fault=(f"byte {error.start} is no UTF-8", 0))
    return parse_document(str(path), text)


def parse_document(name: str, text: str) -> Document:
    """Scan a text, with hjson as the judge of what is valid."""
    if not text.strip():
        return Document(name, text, fault=("the file is empty", 0))
    try:
        syntax = scan(text)
    except SyntaxFaultError as error:
        return _without_places(name, text, error)
    config = syntax.root.to_python()
    if not isinstance(config, dict):
        return Document(name, text, fault=("a ds_config is an object: it begins with {", syntax.root.start))
    return Document(name, text, syntax, config)


def _without_places(name: str, text: str, error: SyntaxFaultError) -> Document:
    """What hjson reads all the same is linted without places."""
    fault = (error.message, error.offset)
    try:
        config = hjson.loads(text)
    except hjson.HjsonDecodeError as refusal:
        return Document(name, text, fault=(refusal.msg[0].lower() + refusal.msg[1:], refusal.pos))
    except RecursionError:
        return Document(name, text, fault=fault)
    if isinstance(config, dict) and "deeply" not in error.message:
        return Document(name, text, config=dict(config))
    return Document(name, text, fault=fault)
