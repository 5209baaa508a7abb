"""DeepSpeed's engine around a built model: how it is made and called, on a virtual GPU and on a real one."""

from typing import Any

import deepspeed
import torch

from dstune.errors import ModelError
from dstune.model.build import BuiltModel

CLIENT_OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-4),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
}
"""Optimizers that a plan may hand to `deepspeed.initialize`."""


def make_engine(built: BuiltModel, client_optimizer: str | None, config: dict[str, Any]) -> Any:
    """`deepspeed.initialize` as training scripts call it.

    Args:
        built: The model.
        client_optimizer: One of `CLIENT_OPTIMIZERS`, or None for what the config names.
        config: The ds_config.
    """
    params = [param for param in built.module.parameters() if param.requires_grad]
    extra = {}
    if client_optimizer is not None:
        extra["optimizer"] = CLIENT_OPTIMIZERS[client_optimizer](params)
    engine, *_ = deepspeed.initialize(model=built.module, model_parameters=params, config=config, **extra)
    return engine


def forward(engine: Any, batch: Any) -> Any:
    """Call an engine with a batch: keyword arguments, positional ones or one argument."""
    if isinstance(batch, dict):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple) else engine(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in whatever a forward returns: itself, `.loss`, `["loss"]`, or the first of a tuple."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if loss is None:
        loss = output
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        msg = "the model's forward returns no loss"
        raise ModelError(msg, hint="return a scalar tensor, an object with `.loss`, or a tuple that begins with it")
    return loss
