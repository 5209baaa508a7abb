"""`MODEL`, in one word: a preset, a folder or file with a `config.json`, a hub id, or `package.module:function`.

Knows how to name and describe a model; building it needs torch and happens in `dstune.model.build`, in a worker.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["ModelSpec"]


class ModelSpec(BaseModel):
    """A model as plain data, ready to cross into a worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """What to call it."""
    config: dict[str, Any] = {}
    """Hugging Face configuration, with `model_type`; empty for a function."""
    class_name: str | None = None
    """transformers' class, such as `LlamaForCausalLM`; None lets the auto class choose."""
    function: str | None = None
    """`package.module:function` instead of a configuration."""
    search_path: str | None = None
    """Folder that is put first on `sys.path` for the function."""
    trust_remote_code: bool = False
    """Whether code that comes with the configuration may run."""
