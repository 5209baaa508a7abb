"""The built-in models, read from `presets.toml`."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from dstune.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Preset:
    """A built-in model.

    Attributes:
        source: The public repository whose values these are.
        class_name: transformers' class.
        config: Configuration values, with `model_type`.
    """

    name: str
    source: str
    class_name: str
    config: dict[str, Any]

    def spec(self) -> ModelSpec:
        """The model as plain data."""
        return ModelSpec(name=self.name, config=self.config, class_name=self.class_name)


@cache
def presets() -> dict[str, Preset]:
    """All built-in models by name, in the order of the file."""
    table = tomllib.loads(files("dstune.model").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: Preset(name, row["source"], row["class"], row["config"]) for name, row in table.items()}
