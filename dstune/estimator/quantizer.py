"""ZeRO++'s quantisation kernels, as far as they allocate.

Source: deepspeed 0.19.8 `ops/csrc/quantization/pt_binding.cpp`; results are allocated in the order below.
"""

import torch

SYMMETRIC, ASYMMETRIC = 0, 1
"""`quantize::Type`: an asymmetric group has an offset beside its scale."""


def _scales(like: torch.Tensor, num_groups: int, kind: int) -> torch.Tensor:
    return like.new_empty((num_groups, 1 + kind), dtype=torch.float32)


def quantize(values: torch.Tensor, num_groups: int, num_bits: int, kind: int) -> list[torch.Tensor]:
    """Integers, two in a byte for 4 bits, and scales."""
    scales = _scales(values, num_groups, kind)
    *rest, last = values.shape
    return [values.new_empty((*rest, last // (1 if num_bits == 8 else 2)), dtype=torch.int8), scales]


def dequantize(
    values: torch.Tensor, _scales: torch.Tensor, _num_groups: int, num_bits: int, _kind: int
) -> torch.Tensor:
    """Half-precision numbers."""
    *rest, last = values.shape
    return values.new_empty((*rest, last * (1 if num_bits == 8 else 2)), dtype=torch.float16)


def swizzle_quant(
    values: torch.Tensor, num_groups: int, num_bits: int, kind: int, _pipeline: int, _nodes: int, _per_node: int
) -> list[torch.Tensor]:
    """Integers in the order of the all-to-all that follows, and scales."""
    scales = _scales(values, num_groups, kind)
    return [values.new_empty((values.numel() // (8 // num_bits),), dtype=torch.int8), scales]


def quantized_reduction(
    values: torch.Tensor,
    _input_scales: torch.Tensor,
    _in_groups: int,
    out_groups: int,
    _num_bits: int,
    kind: int,
    per_node: int,
) -> list[torch.Tensor]:
    """The sum over a node's GPUs, quantised again."""
    scales = _scales(values, out_groups, kind)
    *rest, last = values.shape
    return [values.new_empty((*rest, last // per_node), dtype=torch.int8), scales]
