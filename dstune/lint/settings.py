"""`[tool.dstune.lint]` of the nearest pyproject.toml."""

import difflib
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from dstune.errors import ConfigFileError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file may say; flags come first.

    Attributes:
        select: Rules that count.
        ignore: Rules that do not.
        baseline: File of accepted findings, relative to the pyproject.toml.
        world_size: Data-parallel ranks.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    baseline: str | None = None
    world_size: int | None = None


def read_settings(folder: Path) -> Settings:
    """The settings that hold in a folder.

    Raises:
        ConfigFileError: The table has a fault.
    """
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        if path.is_file():
            return _read(path)
    return Settings()


def _read(path: Path) -> Settings:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigFileError(f"`{path}` cannot be read", because=(str(error),)) from error
    table = content.get("tool", {}).get("dstune", {}).get("lint", {})
    values = {key.replace("-", "_"): value for key, value in table.items()}
    known = {field.name for field in fields(Settings)}
    for name in values.keys() - known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"it may say {', '.join(sorted(known))}"
        raise ConfigFileError(f"{path}: [tool.dstune.lint] has no key `{name}`", hint=hint)
    for name in ("select", "ignore"):
        listed = values.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ConfigFileError(f"{path}: `{name}` is no list of rules", hint=f'write {name} = ["rule-id"]')
        values[name] = tuple(listed)
    if not isinstance(values.get("baseline", ""), str):
        raise ConfigFileError(f"{path}: `baseline` is no file name", hint='write baseline = "dstune-baseline.json"')
    world_size = values.get("world_size", 1)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigFileError(f"{path}: `world-size` is no number of at least 1", hint="write world-size = 8")
    if "baseline" in values:
        values["baseline"] = str(path.parent / values["baseline"])
    return Settings(**values)
