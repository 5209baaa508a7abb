"""Build the module and its batches on the current device. Runs in a worker, under fake tensors."""

import contextlib
import fnmatch
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dstune.errors import ModelError
from dstune.model import ModelSpec
from dstune.model.batch import BatchShape, batch_for
from dstune.model.ulysses import shard
from dstune.plan import TrainingPlan
from dstune.vocab import Attention, Checkpointing

MakeBatch = Callable[[int, int, torch.device], Any]
"""(micro_batch, seq_len, device) -> keyword arguments (dict), positional ones (tuple) or one argument."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A module, and what to feed it."""

    module: torch.nn.Module
    make_batch: MakeBatch


def preload(spec: ModelSpec) -> None:
    """Import what building needs, so that each fork has it already. Faults are left for `build` to report."""
    try:
        if spec.function is None:
            _transformers_class(spec, _transformers_config(spec))
    except Exception:  # noqa: BLE001 - reported by `build`, where the user can be told
        return


def build(spec: ModelSpec, plan: TrainingPlan, around: contextlib.AbstractContextManager[Any]) -> BuiltModel:
    """The model of a plan, in training mode.

    Args:
        spec: Which model.
        plan: How it is trained.
        around: Entered while the module is constructed, as `deepspeed.zero.Init` is.

    Raises:
        ModelError: It cannot be built; the message says why.
    """
    with around:
        built = _from_function(spec) if spec.function is not None else _from_config(spec, plan)
    module = built.module
    if plan.load_dtype is not None:
        module.to(getattr(torch, plan.load_dtype))
    if plan.lora is not None:
        module = _with_lora(module, plan)
    _freeze(module, plan.freeze)
    _set_checkpointing(module, plan.activation_checkpointing)
    config: Any = getattr(module, "config", None)
    if config is not None:
        config.use_cache = False
    module.train()
    return BuiltModel(module, _batches_of(built.make_batch, plan.sequence_parallel_size))


def _batches_of(make_batch: MakeBatch, sequence_parallel_size: int) -> MakeBatch:
    """The same, or parts of sequences if several ranks share them."""
    if sequence_parallel_size == 1:
        return make_batch

    def make_part(micro_batch: int, seq_len: int, device: torch.device) -> Any:
        return shard(make_batch(micro_batch, seq_len // sequence_parallel_size, device), micro_batch)

    return make_part


def _transformers_config(spec: ModelSpec) -> Any:
    import transformers  # noqa: PLC0415 - only where a Hugging Face model is asked for

    values = {name: value for name, value in spec.config.items() if name not in {"model_type", "architectures"}}
    try:
        return transformers.AutoConfig.for_model(spec.config["model_type"], **values)
    except (ValueError, TypeError, KeyError) as error:
        msg = f"transformers cannot read the configuration of `{spec.name}`"
        raise ModelError(msg, hint="check its `model_type` and values", because=(str(error).split("\n")[0],)) from error


def _transformers_class(spec: ModelSpec, config: Any) -> Any:
    import transformers  # noqa: PLC0415

    if spec.class_name is None:
        for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
            known = getattr(transformers, auto)._model_mapping
            if type(config) in known:
                return known[type(config)]
        msg = f"`{spec.name}` names no class to train"
        raise ModelError(msg, hint="put `architectures` into its config.json")
    found = getattr(transformers, spec.class_name, None)
    if found is None:
        msg = f"transformers {transformers.__version__} has no class `{spec.class_name}`"
        raise ModelError(msg, hint="install a transformers that has it, or pass `package.module:function`")
    return found


def _from_config(spec: ModelSpec, plan: TrainingPlan) -> BuiltModel:
    config = _transformers_config(spec)
    model_class = _transformers_class(spec, config)
    config._attn_implementation = _attention_of(model_class, plan.attention)
    try:
        with _without_initialization():
            module = model_class(config)
        module.tie_weights()  # belongs to the initialisation that was skipped
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        msg = f"`{model_class.__name__}` cannot be built from the configuration of `{spec.name}`"
        raise ModelError(msg, because=(f"{type(error).__name__}: {error}",)) from error
    return BuiltModel(module, lambda *shape: batch_for(module, BatchShape(*shape), mask=plan.attention_mask))


def _attention_of(model_class: Any, wanted: Attention) -> str:
    """What transformers calls it; a model that has no fused attention gets the plain one, as it would choose."""
    has_sdpa = getattr(model_class, "_supports_sdpa", True)
    return Attention.EAGER.value if wanted is Attention.EAGER or not has_sdpa else Attention.SDPA.value


def _without_initialization() -> contextlib.AbstractContextManager[Any]:
    """Weights have no content here, so their initialisation is skipped."""
    try:
        from transformers.initialization import no_init_weights  # noqa: PLC0415
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights  # noqa: PLC0415
    manager: contextlib.AbstractContextManager[Any] = no_init_weights()
    return manager


def _from_function(spec: ModelSpec) -> BuiltModel:
    module_name, _, name = str(spec.function).partition(":")
    if spec.search_path is not None:
        sys.path.insert(0, spec.search_path)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        msg = f"`{spec.function}` cannot be imported"
        hint = "write `package.module:function` as you would import it from here"
        raise ModelError(msg, hint=hint, because=(f"{type(error).__name__}: {error}",)) from error
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        msg = f"`{spec.function}` must return a pair: a torch.nn.Module and a function that makes a batch"
        raise ModelError(msg, hint="see docs/how-to/own-model.md")
    return BuiltModel(*made)


def _with_lora(module: torch.nn.Module, plan: TrainingPlan) -> torch.nn.Module:
    try:
        import peft  # noqa: PLC0415 - optional
    except ImportError as error:
        msg = "LoRA needs the package `peft`"
        raise ModelError(msg, hint="pip install peft") from error
    assert plan.lora is not None
    config = peft.LoraConfig(r=plan.lora.r, target_modules=list(plan.lora.targets), lora_dropout=0.0)
    adapted: torch.nn.Module = peft.get_peft_model(module, config)
    return adapted


def _freeze(module: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        found = [param for name, param in module.named_parameters() if fnmatch.fnmatch(name, pattern)]
        if not found:
            first = next(name for name, _ in module.named_parameters())
            msg = f"no parameter is called `{pattern}`"
            raise ModelError(msg, hint=f"shell patterns are compared with whole names, such as `{first}`")
        for param in found:
            param.requires_grad = False


def _set_checkpointing(module: Any, checkpointing: Checkpointing) -> None:
    if checkpointing in {Checkpointing.OFF, Checkpointing.DEEPSPEED}:
        return  # DeepSpeed's own is set up where DeepSpeed is
    if not hasattr(module, "gradient_checkpointing_enable"):
        msg = f"`{type(module).__name__}` has no switch for activation checkpointing"
        raise ModelError(msg, hint="pass --checkpointing off, or add a method `gradient_checkpointing_enable`")
    reentrant = checkpointing is Checkpointing.REENTRANT
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
