"""Rules about the file as text: can it be read, and by whom."""

from collections import Counter
from collections.abc import Iterator

from dstune.lint.rule import Case, Check, Deed, Problem, Rule, Severity
from dstune.lint.rules.example import example


def _syntax(case: Case) -> Iterator[Problem]:
    if case.document.fault is not None:
        message, offset = case.document.fault
        yield Problem((), message, offset=offset)


def _duplicates(case: Case) -> Iterator[Problem]:
    for node in case.document.nodes:
        for key, number in Counter(member.key for member in node.members).items():
            if number > 1:
                last = [member for member in node.members if member.key == key][-1]
                yield Problem((), f"`{key}` is given {number} times", offset=last.start)


def _loose(message: str, *, has_auto: bool) -> Check:
    def check(case: Case) -> Iterator[Problem]:
        syntax = case.document.syntax
        if syntax is not None and syntax.loose_at is not None and case.has_auto is has_auto:
            yield Problem((), message, offset=syntax.loose_at)

    return check


RULES = (
    Rule(
        "syntax-error", Severity.ERROR, "the file cannot be read",
        "Neither DeepSpeed nor any trainer gets past it. Mend the place that is named.",
        '{"train_batch_size": 8,, }\n', example(train_batch_size=8), _syntax, Deed.REFUSES, "",
        "deepspeed runtime/config.py, DeepSpeedConfig.__init__: hjson.load",
    ),
    Rule(
        "duplicate-key", Severity.ERROR, "a key is given more than once",
        "DeepSpeed refuses the file; strict JSON loaders keep the last one without a word. Keep one of them.",
        '{"train_batch_size": 8, "train_batch_size": 16}\n', example(train_batch_size=16), _duplicates,
        Deed.REFUSES, "Duplicate keys", "deepspeed runtime/config_utils.py, dict_raise_error_on_duplicate_keys",
    ),
    Rule(
        "not-strict-json", Severity.NOTE, "comments or loose syntax",
        "DeepSpeed parses files as hjson, with comments and trailing commas. Hugging Face's loaders, and most other"
        " tools, take strict JSON only.",
        '{\n  "train_micro_batch_size_per_gpu": 4 // fits\n}\n', example(train_micro_batch_size_per_gpu=4),
        _loose("strict JSON ends here: DeepSpeed reads on, Hugging Face's loaders do not", has_auto=False),
        Deed.ACCEPTS, "", "accelerate utils/deepspeed.py, HfDeepSpeedConfig.__init__: json.load",
    ),
    Rule(
        "not-strict-json-for-trainer", Severity.ERROR, "comments or loose syntax in a file for Hugging Face",
        "The `auto` values are replaced by Hugging Face's Trainer or Accelerate, whose loader takes strict JSON and"
        " fails here. Take the comments out, or the `auto` values.",
        '{\n  "train_micro_batch_size_per_gpu": "auto" // from the Trainer\n}\n',
        example(train_micro_batch_size_per_gpu="auto"),
        _loose("strict JSON ends here, and the loader that replaces `auto` takes nothing else", has_auto=True),
        Deed.NOT_ASKED, "", "accelerate utils/deepspeed.py, HfDeepSpeedConfig.__init__: json.load",
    ),
)  # fmt: skip
"""The table."""
