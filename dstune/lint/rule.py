"""A rule of the linter: one row that says what it finds, why it matters, and what DeepSpeed does about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from dstune.lint.document import Document, KeyPath

AUTO = "auto"
"""What Hugging Face's Trainer replaces."""


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """Training will not start, or not as the file says."""
    WARNING = "warning"
    """Training starts, and is not what the file seems to say."""
    NOTE = "note"
    """True, and good to know."""


class Deed(StrEnum):
    """What DeepSpeed does with the bad example; a test runs it."""

    REFUSES = "refuses"
    """An exception while the file is parsed."""
    WARNS = "warns"
    """It is parsed, with a warning."""
    ACCEPTS = "accepts"
    """It is parsed without a word."""
    FAILS = "fails"
    """It is parsed; `deepspeed.initialize` or the first step raises an exception."""
    IGNORES = "ignores"
    """It trains, and GPU and host memory are what they are with the good example."""
    NOT_ASKED = "not-asked"
    """The rule is about the text, or needs a model: DeepSpeed has no part in it."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Take the key out."""


@dataclass(frozen=True, slots=True)
class Rename:
    """Give the key another name."""

    key: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Put another value there."""

    value: object
    key: str | None = None


Fix: TypeAlias = Remove | Rename | Replace


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rule has found.

    Attributes:
        path: Keys from the top to the place.
        message: One lower-case sentence.
        fix: What `--fix` does, if it is safe.
        offset: The place, where no key has it.
        suggestion: What was perhaps meant.
    """

    path: KeyPath
    message: str
    fix: Fix | None = None
    offset: int | None = None
    suggestion: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known beside the file.

    Attributes:
        world_size: Data-parallel ranks, if the user said.
        gpu: Name and compute capability of the GPU, if the user said.
        model_dtype: Data type in the model's own config, if there is a model.
    """

    world_size: int | None = None
    gpu: tuple[str, tuple[int, int]] | None = None
    model_dtype: str | None = None


@dataclass(frozen=True)
class Case:
    """A document and its surroundings, as rules see them."""

    document: Document
    around: Surroundings = field(default_factory=Surroundings)

    @property
    def config(self) -> Mapping[str, Any]:
        """All values."""
        return self.document.config

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at `a.b.c`, or the default."""
        found: Any = self.config
        for key in dotted.split("."):
            if not isinstance(found, dict) or key not in found:
                return default
            found = found[key]
        return found

    def has(self, dotted: str) -> bool:
        """Whether the key is there."""
        return self.get(dotted, self) is not self

    def block(self, dotted: str) -> dict[str, Any]:
        """The object there, or an empty one."""
        found = self.get(dotted)
        return found if isinstance(found, dict) else {}

    @property
    def stage(self) -> int:
        """ZeRO stage as DeepSpeed takes it; -1 if it is none."""
        block = self.get("zero_optimization")
        if isinstance(block, bool):
            return int(block)
        stage = self.block("zero_optimization").get("stage", 0)
        try:
            return int(stage)
        except (TypeError, ValueError):
            return -1

    def offload(self, which: str) -> str:
        """Device of `offload_param` or `offload_optimizer`: none, cpu or nvme."""
        block = self.get(f"zero_optimization.{which}")
        return str(block.get("device", "none")) if isinstance(block, dict) else "none"

    @property
    def has_auto(self) -> bool:
        """Whether the file is written for Hugging Face's Trainer or Accelerate."""
        return any(node.value == AUTO for node in self.document.nodes)

    def number(self, dotted: str) -> float | None:
        """A number there; None for anything else."""
        value = self.get(dotted)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


Check: TypeAlias = Callable[[Case], Iterable[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    Attributes:
        id: In kebab-case; never changed once released.
        severity: How bad it is.
        what: What is found, in one sentence.
        why: What it does to training, and what to do.
        bad: A ds_config in which it is found.
        good: The same, mended.
        check: Finds it.
        deed: What DeepSpeed does with the bad example.
        says: Regular expression of what DeepSpeed says, if it says anything.
        source: Where that stands.
        is_fixable: Whether `--fix` can mend it.
        surroundings: What the examples need beside the file.
    """

    id: str
    severity: Severity
    what: str
    why: str
    bad: str
    good: str
    check: Check
    deed: Deed
    says: str = ""
    source: str = ""
    is_fixable: bool = False
    surroundings: Surroundings = Surroundings()


def path_of(dotted: str) -> KeyPath:
    """`a.b` as a path."""
    return tuple(dotted.split("."))


def when(condition: Callable[[Case], object], dotted: str, message: str, fix: Fix | None = None) -> Check:
    """A check of one condition: the problem stands at a key."""

    def check(case: Case) -> Iterator[Problem]:
        if condition(case):
            value = case.get(dotted)
            shown = {"value": value, "stage": case.stage}
            yield Problem(path_of(dotted), message.format(**shown), fix)

    return check
