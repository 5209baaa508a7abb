"""A synthetic batch of the kind a model's family is trained on."""

from typing import Any, NamedTuple

import torch

DEFAULT_IMAGE_SIZE = 224
"""Pixels a side for models that take any, such as ResNet: what ImageNet's processors make."""


class BatchShape(NamedTuple):
    """How large, and where."""

    micro_batch: int
    seq_len: int
    device: torch.device


def batch_for(module: torch.nn.Module, shape: BatchShape, *, mask: bool | None) -> dict[str, Any]:
    """Keyword arguments of one micro-step.

    Args:
        module: A transformers model, perhaps wrapped by peft.
        shape: Sequences, tokens, device.
        mask: Whether to pass an attention mask of ones; None means where the family's tokenizers always give one.
    """
    config: Any = module.config
    kind = _family(module, config)
    if kind == "image":
        return _images(module, config, shape)
    if kind == "audio":
        return _audio(module, config, shape)
    ids = torch.zeros((shape.micro_batch, shape.seq_len), dtype=torch.long, device=shape.device)
    batch: dict[str, Any] = {"input_ids": ids, "labels": _labels(module, ids)}
    if mask or (mask is None and _expects_mask(module, config)):
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def _family(module: torch.nn.Module, config: Any) -> str:
    """What a model reads. Some image models have a vocabulary, of visual words."""
    if "ForImage" in type(module).__name__:
        return "image"
    if getattr(config, "num_mel_bins", None) is not None:
        return "audio"
    has_images = getattr(config, "image_size", None) is not None
    return "image" if has_images and getattr(config, "vocab_size", None) is None else "text"


def _audio(module: torch.nn.Module, config: Any, shape: BatchShape) -> dict[str, Any]:
    """Mel spectrograms of whole windows (two frames a position, as Whisper's first convolutions take), and a text."""
    size = (shape.micro_batch, config.num_mel_bins, 2 * config.max_source_positions)
    features = torch.empty(size, dtype=next(module.parameters()).dtype, device=shape.device)
    length = min(shape.seq_len, config.max_target_positions)
    labels = torch.zeros((shape.micro_batch, length), dtype=torch.long, device=shape.device)
    return {"input_features": features, "labels": labels}


def _images(module: torch.nn.Module, config: Any, shape: BatchShape) -> dict[str, Any]:
    size = getattr(config, "image_size", None) or DEFAULT_IMAGE_SIZE
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    dtype = next(module.parameters()).dtype
    pixels = torch.empty((shape.micro_batch, config.num_channels, height, width), dtype=dtype, device=shape.device)
    return {"pixel_values": pixels, "labels": torch.zeros(shape.micro_batch, dtype=torch.long, device=shape.device)}


def _labels(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One label a token, or one a sequence for classifiers."""
    if type(module).__name__.endswith("ForSequenceClassification"):
        return ids.new_zeros(ids.shape[0])
    return ids


def _expects_mask(module: torch.nn.Module, config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False)) or "MaskedLM" in type(module).__name__
