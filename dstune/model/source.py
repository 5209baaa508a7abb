"""Resolve the word `MODEL` to a `ModelSpec`, before anything slow begins."""

import difflib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from dstune.errors import ConfigFileError, ModelError, UsageError
from dstune.jsonfile import read_json
from dstune.model import ModelSpec
from dstune.model.presets import presets

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def resolve(text: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """Find out which of the four sources is meant.

    Raises:
        UsageError: It is none of them; the nearest preset is named.
        ConfigFileError: Its `config.json` is missing or malformed.
        ModelError: A hub id whose configuration cannot be had.
    """
    if text in presets():
        return presets()[text].spec()
    path = Path(text).expanduser()
    if path.exists() or text.endswith(".json"):
        return _from_path(path, trust_remote_code=trust_remote_code)
    if _FUNCTION.fullmatch(text):
        return ModelSpec(name=text, function=text, search_path=str(Path.cwd()))
    if _HUB_ID.fullmatch(text):
        return _from_hub(text, trust_remote_code=trust_remote_code)
    raise _unknown(text)


def _unknown(text: str) -> UsageError:
    near = difflib.get_close_matches(text.lower(), presets(), n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else "run `dstune models` for the built-in ones"
    return UsageError(
        f"`{text}` is no model",
        hint=f"{hint} A folder with a config.json, a hub id `org/name` and `package.module:function` work too",
    )


def _from_path(path: Path, *, trust_remote_code: bool) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    return _from_config(read_config(file), path.stem or path.name, trust_remote_code=trust_remote_code)


def read_config(file: Path) -> dict[str, Any]:
    """A Hugging Face configuration.

    Raises:
        ConfigFileError: It is missing, unreadable, no JSON object, or lacks `model_type`.
    """
    config = read_json(file, "name a folder that holds the model's config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigFileError(f"{file}:1: no `model_type`", hint="name the config.json of a Hugging Face model")
    return config


def _from_config(config: dict[str, Any], name: str, *, trust_remote_code: bool) -> ModelSpec:
    architectures = config.get("architectures") or []
    if "auto_map" in config and not trust_remote_code:
        raise UsageError(f"`{name}` brings its own code", hint="read it, then pass --trust-remote-code")
    if "auto_map" in config:
        raise ModelError(
            f"`{name}` is built by code that is not part of transformers",
            hint="pass it as `package.module:function` instead (see docs/how-to/own-model.md)",
        )
    return ModelSpec(
        name=name,
        config=config,
        class_name=_training_class(architectures[0]) if architectures else None,
        trust_remote_code=trust_remote_code,
    )


def _training_class(architecture: str) -> str | None:
    """The class to train; a bare encoder such as `LlamaModel` has no loss, so the auto class decides."""
    return (
        None
        if re.fullmatch(r"\w+Model", architecture)
        and "For" not in architecture
        and not (architecture.endswith("LMHeadModel"))
        else architecture
    )


def _from_hub(name: str, *, trust_remote_code: bool) -> ModelSpec:
    """Only the configuration is fetched; huggingface_hub reads HF_HOME, HF_TOKEN and HF_HUB_OFFLINE."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(f"`{name}` is a hub id, and huggingface_hub is not installed", hint="pip install transformers")
    import huggingface_hub  # noqa: PLC0415 - only where a hub id is given
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        path = huggingface_hub.hf_hub_download(name, "config.json")
    except errors.GatedRepoError:
        raise ModelError(
            f"`{name}` is gated and no token was accepted",
            hint="run `hf auth login`, or pass a folder that holds its config.json",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"the hub has no `{name}`", hint="check the name, or run `dstune models`") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError, errors.HfHubHTTPError) as error:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        raise ModelError(
            f"the configuration of `{name}` is not on this machine and {offline}",
            hint="pass a folder that holds its config.json, or a preset from `dstune models`",
            because=(str(error).split("\n")[0][:200],),
        ) from None
    return _from_config(read_config(Path(path)), name, trust_remote_code=trust_remote_code)
