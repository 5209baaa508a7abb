"""What CUDA's fused attention kernels allocate beside their results, and in which order.

Sources are files of torch 2.11 below `aten/src/ATen`; every row was seen in event lists recorded on an H200, flash and
memory-efficient attention by asking for them.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from dstune.estimator.gpu import GpuTraits
from dstune.estimator.steps import Args, Scratch, Step, give, on_host, result, size_of, take

SEED_BYTES = 8
SPLIT_ROWS = 64
"""Queries of a block, as flash attention counts them when it decides on splits (`set_params_splitkv`)."""


def _cudnn_attention(_args: Args, _kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cudnn/MHA.cpp` (`run_cudnn_SDP_fprop`): seed and offset, results, a small workspace."""
    for index in (-2, -1, 0, 1):
        yield result(index)
    yield take(256)


def _cudnn_attention_backward(args: Args, _kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cudnn/MHA.cpp` (`run_cudnn_SDP_bprop`): dQ in float32, a row sum, and dK, dV of every query head."""
    yield from (result(0), result(1), result(2))
    query, key = args[1], args[2]
    batch, heads, rows, _ = query.shape
    size = size_of(query, 4) + 4 * batch * heads * rows + 256
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * key.shape[3] * key.element_size()
    yield take(size)


def _flash_attention(args: Args, _kwargs: dict[str, Any], _out: Any, gpu: GpuTraits) -> Iterator[Step]:
    """`native/transformers/cuda/flash_attn/flash_api.cpp` (`mha_fwd`): few rows are split along the keys."""
    query, key, dropout = args[0], args[1], args[3] if len(args) > 3 else 0.0
    batch, heads, rows, head_dim = query.shape
    yield from (result(0), result(1))
    if dropout:
        yield take(2 * SEED_BYTES, 1)
    else:
        splits = num_splits(batch * heads * -(-rows // SPLIT_ROWS), key.shape[2], head_dim, gpu)
        if splits > 1:
            yield take(4 * splits * batch * heads * rows, 2)
            yield take(4 * splits * batch * heads * rows * _rounded(head_dim), 3)
    yield from (result(2), result(3))


def num_splits(num_blocks: int, key_len: int, head_dim: int, gpu: GpuTraits) -> int:
    """Into how many parts the keys are cut: the least number that fills the GPU nearly as well as the best.

    Source: the same file (`num_splits_heuristic`, `set_params_splitkv`).
    """
    slots = 2 * gpu.num_multiprocessors
    if num_blocks >= 0.8 * slots:
        return 1
    tiles = -(-key_len // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    eligible = [
        count
        for count in range(1, min(128, slots, tiles) + 1)
        if count == 1 or -(-tiles // count) != -(-tiles // (count - 1))
    ]
    waves = {count: num_blocks * count / slots for count in eligible}
    filled = {count: number / math.ceil(number) for count, number in waves.items()}
    return next(count for count in eligible if filled[count] >= 0.85 * max(filled.values()))


def _rounded(head_dim: int) -> int:
    """`head_size_rounded`: the size of a head that the kernels are built for."""
    grain = 32 if head_dim <= 128 else 64
    return -(-head_dim // grain) * grain


def _flash_attention_backward(args: Args, _kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """The same file (`mha_bwd`): row sums, dQ in float32, dK and dV of every query head."""
    yield from (result(0), result(1), result(2))
    query, key = args[1], args[2]
    batch, heads, rows, head_dim = query.shape
    rounded_rows = -(-rows // 128) * 128
    yield take(4 * batch * heads * rounded_rows, 1)
    yield take(4 * batch * heads * rounded_rows * _rounded(head_dim), 2)
    if key.shape[1] != heads:
        expanded = batch * heads * key.shape[2] * head_dim * key.element_size()
        yield from (take(expanded, 3), take(expanded, 4), give(4), give(3))
    yield from (give(2), give(1))


def _efficient_attention(_args: Args, _kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/transformers/cuda/attention.cu` (`_efficient_attention_forward`): seed and offset are the host's."""
    yield from (result(0), result(1), on_host(2), on_host(3))


def _efficient_attention_backward(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/transformers/cuda/attention_backward.cu`: delta, for float32 outside the kernel, and dQ's workspace.

    The workspace holds accumulators and 16 bytes for each 64 queries of each head, or each 128 where a head is larger
    than 64 (`GradQTempStorage` in `mem_eff_attention/kernel_backward.h`). A mask's gradient comes after the others.
    """
    yield from (result(0), result(1), result(2))
    if out[3] is not None and out[3].numel():
        yield result(3)
    query = args[1]
    batch, heads, rows, head_dim = query.shape
    delta = 4 * batch * heads * rows
    if query.dtype == torch.float32:
        yield take(size_of(query), 1)
        yield take(delta, 2)
        yield take(delta, 3)
        yield give(2)
        yield give(1)
    else:
        yield take(delta, 3)
    tile = 64 if head_dim <= 64 else 128
    yield take(batch * heads * -(-rows // tile) * (4 * tile * (-(-head_dim // 64) * 64) + 16), 4)
    yield give(3)
    yield give(4)


ATTENTION: dict[str, Scratch] = {
    "aten::_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::_scaled_dot_product_flash_attention": _flash_attention,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
"""Operation's name -> what happens inside it on CUDA."""
