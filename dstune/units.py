"""Parse and print bytes and counts. Sizes are 1024-based, and always said so (GiB, never GB)."""

import re

from dstune.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kb": KIB,
    "kib": KIB,
    "m": MIB,
    "mb": MIB,
    "mib": MIB,
    "g": GIB,
    "gb": GIB,
    "gib": GIB,
    "t": 1 << 40,
    "tb": 1 << 40,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def is_size(text: str) -> bool:
    """Whether the text is a size such as `24GiB` or `80g`, rather than a name."""
    match = _SIZE.fullmatch(text.strip())
    return bool(match) and match is not None and match["unit"].lower() in _FACTORS


def parse_bytes(text: str, what: str = "size") -> int:
    """Read `80GiB`, `24g`, `512 MiB` or a plain number of bytes.

    Raises:
        UsageError: The text is no size, or is not positive.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        msg = f"`{text}` is no {what}"
        raise UsageError(msg, hint="write a number and a unit, such as 80GiB or 512MiB")
    size = int(float(match["number"]) * factor)
    if size <= 0:
        msg = f"{what} `{text}` must be more than nothing"
        raise UsageError(msg, hint="write a number and a unit, such as 80GiB or 512MiB")
    return size


def gib(size: float) -> str:
    """Bytes as GiB with one decimal and no unit: the unit belongs to the column's header."""
    return f"{size / GIB:.1f}"


def count(number: int) -> str:
    """A large count for people: `8.03 B`, `124 M`."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return str(number)
