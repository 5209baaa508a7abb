"""A model that is no Hugging Face model: what `dstune estimate tests.examples.own_model:make` needs."""

import torch
from torch import nn
from torch.nn import functional


class Regressor(nn.Module):
    """Its forward returns the loss."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = features + layer(features)
        return functional.mse_loss(features, targets)


def make_batch(micro_batch: int, seq_len: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What one forward gets; create everything on the device that is given."""
    shape = (micro_batch, seq_len, 512)
    features = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    return {"features": features, "targets": torch.zeros_like(features)}


def make() -> tuple[nn.Module, object]:
    """The module and its batch function."""
    return Regressor(), make_batch


def broken() -> tuple[nn.Module, object]:
    """What a fault looks like."""
    msg = "the checkpoint is not here"
    raise FileNotFoundError(msg)


class RaisesInForward(Regressor):
    """A fault in the user's own forward, called through DeepSpeed's engine."""

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(features @ targets, targets)


def make_raising() -> tuple[nn.Module, object]:
    """Shapes that do not go together."""
    return RaisesInForward(), make_batch


class ReadsValues(Regressor):
    """Asks for a value that only real data has, and acts on it."""

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = features.mean(dim=(1, 2)) > 0
        return super().forward(features[rows], targets[rows])


def make_reading_values() -> tuple[nn.Module, object]:
    """A shape that depends on data."""
    return ReadsValues(), make_batch


class Indexes(Regressor):
    """Takes and sets columns by a list."""

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chosen = features[:, [0, 1]]
        weights = torch.ones_like(chosen)
        weights[:, [0]] = 2.0
        return super().forward(chosen * weights, targets[:, [0, 1]])


def make_indexing() -> tuple[nn.Module, object]:
    """Lists as indices."""
    return Indexes(), make_batch


def make_compiled() -> tuple[nn.Module, object]:
    """A compiled model."""
    module = Regressor()
    compiled = torch.compile(module)
    assert isinstance(compiled, nn.Module)
    return compiled, make_batch
