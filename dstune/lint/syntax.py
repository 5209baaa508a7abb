"""Where each key and value of a ds_config stands: a scanner of JSON and of hjson, which DeepSpeed reads.

The values are those that the hjson library gives (a test compares them); what the library cannot say is where.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_DEPTH = 64
"""Of objects and arrays in each other; a ds_config has 7."""
BLANK = " \t\r\n"
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
WORDS = {"true": True, "false": False, "null": None}
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class SyntaxFaultError(ValueError):
    """The text is no hjson.

    Args:
        message: What is wrong.
        offset: Where, in characters from the start.
    """

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


@dataclass(slots=True)
class Node:
    """A value and its place.

    Attributes:
        value: A scalar's value; None for an object or an array.
        start: Offset of its first character.
        end: Offset after its last one.
        members: Of an object, in order, each as often as it is written.
        items: Of an array.
        is_object: Whether it is one.
        is_array: Whether it is one.
    """

    value: object
    start: int
    end: int = 0
    members: "list[Member]" = field(default_factory=list)
    items: "list[Node]" = field(default_factory=list)
    is_object: bool = False
    is_array: bool = False

    def to_python(self) -> object:
        """Plain values; the last of a key that is given twice."""
        if self.is_object:
            return {member.key: member.node.to_python() for member in self.members}
        return [item.to_python() for item in self.items] if self.is_array else self.value

    def find(self, path: tuple[str, ...]) -> "Member | None":
        """The member at a path of keys."""
        found = next((member for member in self.members if path and member.key == path[0]), None)
        return found if found is None or len(path) == 1 else found.node.find(path[1:])

    def walk(self) -> "Iterator[Node]":
        """This node and all below it."""
        yield self
        for child in (*(member.node for member in self.members), *self.items):
            yield from child.walk()


@dataclass(slots=True)
class Member:
    """A key of an object, and what it holds."""

    key: str
    start: int
    end: int
    node: Node


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment, with its mark."""

    start: int
    text: str


@dataclass(slots=True)
class Syntax:
    """A text, scanned.

    Attributes:
        root: Its value.
        comments: In order.
        loose_at: Offset of the first thing that strict JSON refuses, or None.
    """

    root: Node
    comments: list[Comment]
    loose_at: int | None


def scan(text: str) -> Syntax:
    """Find the place of everything.

    Raises:
        SyntaxFaultError: It is no hjson, or nested too deeply.
    """
    scanner = _Scanner(text)
    root = scanner.read_root()
    return Syntax(root, scanner.comments, scanner.loose_at)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.comments: list[Comment] = []
        self.loose_at: int | None = None

    def read_root(self) -> Node:
        self._skip()
        if self._peek() in ("{", "["):
            root = self._read_value(0)
        else:
            self._loosen(self._at)
            root = self._read_members(Node(None, self._at, is_object=True), "", 0)
        self._skip()
        if self._at < len(self._text):
            raise SyntaxFaultError("text after the end of the value", self._at)
        return root

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _loosen(self, offset: int) -> None:
        """Remember the first thing that strict JSON refuses."""
        self.loose_at = offset if self.loose_at is None else min(self.loose_at, offset)

    def _skip(self) -> None:
        """Blanks and comments."""
        while True:
            while self._peek() and self._peek() in BLANK:
                self._at += 1
            start = self._at
            if self._text.startswith("/*", start):
                end = self._text.find("*/", start)
                self._at = len(self._text) if end < 0 else end + 2
            elif self._peek() == "#" or self._text.startswith("//", start):
                end = self._text.find("\n", start)
                self._at = len(self._text) if end < 0 else end
            else:
                return
            self.comments.append(Comment(start, self._text[start : self._at]))
            self._loosen(start)

    def _read_value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise SyntaxFaultError("nested too deeply to be a configuration", self._at)
        node = Node(None, self._at)
        match self._peek():
            case "{":
                node.is_object = True
                self._at += 1
                self._read_members(node, "}", depth)
            case "[":
                node.is_array = True
                self._at += 1
                self._read_items(node, depth)
            case '"' | "'":
                node.value = self._read_string()
            case _:
                node.value = self._read_bare()
        node.end = self._at
        return node

    def _read_members(self, node: Node, closing: str, depth: int) -> Node:
        comma_at = None
        while True:
            self._skip()
            if self._peek() == closing:
                self._at += len(closing)
                if comma_at is not None:
                    self._loosen(comma_at)
                node.end = self._at
                return node
            if not self._peek():
                raise SyntaxFaultError("the object is not closed", node.start)
            if node.members and comma_at is None:
                self._loosen(self._at)
            start = self._at
            key = self._read_key()
            end = self._at
            self._skip()
            if self._peek() != ":":
                raise SyntaxFaultError(f"`:` is missing after the key `{key}`", self._at)
            self._at += 1
            self._skip()
            node.members.append(Member(key, start, end, self._read_value(depth + 1)))
            comma_at = self._read_comma()

    def _read_items(self, node: Node, depth: int) -> None:
        comma_at = None
        while True:
            self._skip()
            if self._peek() == "]":
                self._at += 1
                if comma_at is not None:
                    self._loosen(comma_at)
                return
            if not self._peek():
                raise SyntaxFaultError("the array is not closed", node.start)
            if node.items and comma_at is None:
                self._loosen(self._at)
            node.items.append(self._read_value(depth + 1))
            comma_at = self._read_comma()

    def _read_comma(self) -> int | None:
        self._skip()
        if self._peek() != ",":
            return None
        self._at += 1
        return self._at - 1

    def _read_key(self) -> str:
        if self._peek() in ('"', "'"):
            return self._read_string()
        self._loosen(self._at)
        match = re.compile(r"[^\s{}\[\],:]+").match(self._text, self._at)
        if match is None:
            raise SyntaxFaultError(f"a key is expected, not `{self._peek()}`", self._at)
        self._at = match.end()
        return match.group()

    def _read_string(self) -> str:
        start, quote = self._at, self._peek()
        if quote == "'":
            self._loosen(start)
        if self._text.startswith("'''", start):
            return self._read_long_string()
        self._at += 1
        made: list[str] = []
        while (char := self._peek()) != quote:
            if not char or char == "\n":
                raise SyntaxFaultError("the string is not closed", start)
            self._at += 1
            made.append(self._read_escape() if char == "\\" else char)
        self._at += 1
        # two escapes can be the halves of one character
        return "".join(made).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _read_escape(self) -> str:
        char = self._peek()
        self._at += 1
        if char != "u":
            return ESCAPES.get(char, char)
        digits = self._text[self._at : self._at + 4]
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise SyntaxFaultError("four hexadecimal digits must follow \\u", self._at)
        self._at += 4
        return chr(int(digits, 16))

    def _read_long_string(self) -> str:
        end = self._text.find("'''", self._at + 3)
        if end < 0:
            raise SyntaxFaultError("the string is not closed", self._at)
        inside = self._text[self._at + 3 : end]
        self._at = end + 3
        return inside.strip("\n")

    def _read_bare(self) -> object:
        """A number or a word up to its end, else a string without quotes up to the end of the line."""
        start = self._at
        match = re.compile(r"[^\s,}\]#]+").match(self._text, start)
        token = match.group() if match else ""
        token = re.split(r"//|/\*", token)[0]
        if NUMBER.fullmatch(token) or token in WORDS:
            rest = self._text[start + len(token) :].split("\n", 1)[0].lstrip(" \t\r")
            if not rest or rest[0] in ",}]#" or rest.startswith(("//", "/*")):
                self._at = start + len(token)
                return WORDS[token] if token in WORDS else json.loads(token)
        if not token or self._text[start] in "{}[],:":
            raise SyntaxFaultError(f"a value is expected, not `{self._peek() or 'the end'}`", start)
        self._loosen(start)
        end = self._text.find("\n", start)
        self._at = len(self._text) if end < 0 else end
        return self._text[start : self._at].strip()
