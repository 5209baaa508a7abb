"""`scaled_dot_product_attention` as CUDA would run it: the kernel it chooses, with what surrounds the call.

Sources: torch 2.11 `aten/src/ATen/native/transformers/attention.cpp` for masks, padding and scale.
"""

from collections.abc import Callable
from typing import Any

import torch

from dstune.estimator import autocast
from dstune.estimator.attention import AttentionCall, AttentionKernel, choose_kernel
from dstune.estimator.device import DEVICE_TYPE
from dstune.estimator.gpu import GpuTraits

aten = torch.ops.aten


def virtual_sdpa(original: Any, traits: GpuTraits) -> Callable[..., torch.Tensor]:
    """The function that takes CUDA's branches on the virtual GPU, and torch's own elsewhere."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type != DEVICE_TYPE:
            plain: torch.Tensor = original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return plain
        query, key, value, attn_mask = autocast.lowered(query, key, value, attn_mask)
        call = _describe(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = choose_kernel(call, traits)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _bias_from_bool(attn_mask, query.dtype)
        if kernel is AttentionKernel.CUDNN:
            return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
                query, key, value, attn_mask, call.requires_grad, dropout_p, is_causal, scale=scale
            )[0]
        if kernel is AttentionKernel.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel is AttentionKernel.EFFICIENT:
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, call.requires_grad)
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _describe(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionCall:
    return AttentionCall(
        dtype=str(query.dtype).removeprefix("torch."),
        num_heads=query.shape[-3],
        num_kv_heads=key.shape[-3],
        query_len=query.shape[-2],
        key_len=key.shape[-2],
        head_dim=query.shape[-1],
        value_head_dim=value.shape[-1],
        has_mask=mask is not None,
        mask_requires_grad=mask is not None and mask.requires_grad,
        is_causal=is_causal,
        dropout=dropout,
        enable_gqa=enable_gqa,
        has_dense_rows=all(part is None or part.stride(-1) == 1 for part in (query, key, value, mask)),
        requires_grad=torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )


def _bias_from_bool(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Source: torch 2.11 `aten/src/ATen/native/transformers/attention.cpp` (`convert_boolean_attn_mask`)."""
    kept, dropped = (torch.scalar_tensor(bias, dtype=dtype, device=mask.device) for bias in (0.0, float("-inf")))
    return torch.where(mask, kept, dropped)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Heads are padded to a multiple of 8 (`pad_last_dim<8>` in the same file)."""
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    if head_dim % 8:
        query, key, value = (torch.nn.functional.pad(part, (0, 8 - head_dim % 8)) for part in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale)[0]
    return out[..., :head_dim] if head_dim % 8 else out  # type: ignore[no-any-return]


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    requires_grad: bool,
) -> torch.Tensor:
    """The mask is expanded to all heads, its rows padded to a multiple of 8 (`preprocess_mask`; recorded with 49)."""
    if mask is not None:
        length = mask.shape[-1]
        if length % 8:
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, mask, requires_grad, dropout, is_causal, scale=scale
    )[0]
