"""Reference pages of the linter's rules: python -m dstune.report.rulepages DOCS."""

import sys
from pathlib import Path

from dstune.lint.inspection import EXTRA_RULES
from dstune.lint.rule import Deed, Rule
from dstune.lint.rules import RULES

DEEDS = {
    Deed.REFUSES: "refuses the file when it parses it",
    Deed.WARNS: "takes it, with a warning",
    Deed.ACCEPTS: "takes it without a word",
    Deed.FAILS: "takes it, and raises an exception when training starts",
    Deed.IGNORES: "takes it without a word; memory on GPU and host stays the same to the byte",
    Deed.NOT_ASKED: "is not asked: the rule is about the text, the trainer, the model or the GPU",
}


def page(rule: Rule) -> str:
    """One rule."""
    fix = " `--fix` mends it." if rule.is_fixable else ""
    return (
        f"# {rule.id}\n\n**{rule.severity.value}**: {rule.what}.{fix}\n\n{rule.why}\n\n"
        f"DeepSpeed {DEEDS[rule.deed]}.\n\nBad:\n\n```json\n{rule.bad}```\n\nGood:\n\n```json\n{rule.good}```\n\n"
        f"Source: {rule.source}.\n"
    )


def index() -> str:
    """The table of all."""
    rows = [
        f"| [{rule.id}]({rule.id}.md) | {rule.severity.value} | {rule.what} | {'yes' if rule.is_fixable else ''} |"
        for rule in RULES.values()
    ]
    extra = [f"| {name} | error | {EXTRA_RULES[name]} | |" for name in EXTRA_RULES]
    title = "# Rules of `dstune lint`\n\nGenerated from the table of rules.\n"
    head = f"{title}\n| rule | severity | finds | `--fix` |\n|---|---|---|---|"
    return "\n".join([head, *rows, *extra, ""])


def pages() -> dict[str, str]:
    """File name -> text."""
    return {"index.md": index(), **{f"{rule.id}.md": page(rule) for rule in RULES.values()}}


def main() -> None:
    """Write them all into `DOCS/reference/rules`."""
    folder = Path(sys.argv[1]) / "reference" / "rules"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
