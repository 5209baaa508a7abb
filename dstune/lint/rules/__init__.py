"""All rules of the linter, as one table."""

from dstune.lint.rule import Rule
from dstune.lint.rules import batch, keys, optimizer, precision, text, training, zero

RULES: dict[str, Rule] = {
    rule.id: rule for module in (text, keys, batch, zero, precision, optimizer, training) for rule in module.RULES
}
"""By id, in the order of the documentation."""
