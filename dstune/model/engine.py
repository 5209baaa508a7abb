"""DeepSpeed's engine around a built model: how it is made and called, on a virtual GPU and on a real one."""

from typing import Any

import deepspeed
import torch

from dstune.errors import ModelError
from dstune.model import ulysses
from dstune.model.build import BuiltModel
from dstune.plan import TrainingPlan
from dstune.vocab import ClientOptimizer

CLIENT_OPTIMIZERS = {
    ClientOptimizer.ADAM: lambda params: torch.optim.Adam(params, lr=1e-4),
    ClientOptimizer.ADAFACTOR: lambda params: torch.optim.Adafactor(params, lr=1e-4),
    ClientOptimizer.ADAMW: lambda params: torch.optim.AdamW(params, lr=1e-4),
    ClientOptimizer.SGD: lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    ClientOptimizer.ADAM_8BIT: lambda params: _bitsandbytes("Adam8bit", params),
    ClientOptimizer.ADAMW_8BIT: lambda params: _bitsandbytes("AdamW8bit", params),
}
"""Optimizers that a plan may hand to `deepspeed.initialize`."""


def _bitsandbytes(name: str, params: list[torch.nn.Parameter]) -> Any:
    """An optimizer whose states have 8 bits, from a package that need not be there."""
    try:
        import bitsandbytes  # noqa: PLC0415 - optional
    except ImportError as error:
        msg = f"{name} needs the package `bitsandbytes`"
        raise ModelError(msg, hint="pip install bitsandbytes") from error
    return getattr(bitsandbytes.optim, name)(params, lr=1e-4)


def make_engine(built: BuiltModel, plan: TrainingPlan, config: dict[str, Any]) -> Any:
    """`deepspeed.initialize` as training scripts call it.

    Args:
        built: The model.
        plan: How it is trained.
        config: The ds_config, which may differ from the plan's where a machine needs it.
    """
    params = [param for param in built.module.parameters() if param.requires_grad]
    extra = {"mpu": ulysses.register(built.module, plan)}
    if plan.client_optimizer is not None:
        extra["optimizer"] = CLIENT_OPTIMIZERS[plan.client_optimizer](params)
    engine, *_ = deepspeed.initialize(model=built.module, model_parameters=params, config=config, **extra)
    return engine


def train_loss(engine: Any, batch: Any) -> torch.Tensor:
    """Call an engine with a batch; the loss to go backward from."""
    loss = loss_of(forward(engine, batch))
    is_part = isinstance(batch, dict) and "shift_labels" in batch
    return ulysses.loss_of_sequence(loss, batch) if is_part else loss


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
