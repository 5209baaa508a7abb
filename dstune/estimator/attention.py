"""Which kernel CUDA's `scaled_dot_product_attention` would choose. Pure decisions, no torch.

The kernel decides what is kept for the backward: a flash kernel keeps one number a row, the math path whole matrices.
Source of every rule: torch 2.11 `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`.
"""

from dataclasses import dataclass
from enum import StrEnum

from dstune.estimator.gpu import GpuTraits

FLASH_MAX_HEAD_DIM = 256
"""`check_head_dim_size_flash`."""
CUDNN_MAX_HEAD_DIM = 256
"""`check_cudnn_tensor_shapes` on Hopper; half of it elsewhere. An H200 trained heads of 256 through it."""


class AttentionKernel(StrEnum):
    """The implementations, in CUDA's order of preference; cuDNN's comes first on Hopper and Blackwell only."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the choice depends on.

    Attributes:
        dtype: `float16`, `bfloat16`, `float32` ...
        num_heads, num_kv_heads: Heads of the query, of key and value.
        query_len, key_len: Tokens.
        head_dim, value_head_dim: Size of a head.
        has_dense_rows: Whether the last dimension of query, key, value and mask lies in one piece.
    """

    dtype: str
    num_heads: int
    num_kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    value_head_dim: int
    has_mask: bool
    mask_requires_grad: bool
    is_causal: bool
    dropout: float
    requires_grad: bool
    enable_gqa: bool = False
    has_dense_rows: bool = True


def choose_kernel(call: AttentionCall, gpu: GpuTraits) -> AttentionKernel:
    """The kernel CUDA would run for a call on a GPU."""
    if call.num_heads != call.num_kv_heads and not call.enable_gqa:
        return AttentionKernel.MATH  # `check_batch_size_and_num_heads_dense`: fused kernels do not broadcast heads
    if not call.has_dense_rows:
        return AttentionKernel.MATH  # `check_last_dim_stride_equals_1_dense`
    wanted = {AttentionKernel.FLASH: _flash_takes, AttentionKernel.EFFICIENT: _efficient_takes}
    for kernel, takes in wanted.items():
        if gpu.wanted_attention == kernel and takes(call, gpu):
            return kernel
    if gpu.prefers_cudnn_attention and _cudnn_takes(call, gpu):
        return AttentionKernel.CUDNN
    if _flash_takes(call, gpu):
        return AttentionKernel.FLASH
    if _efficient_takes(call, gpu):
        return AttentionKernel.EFFICIENT
    return AttentionKernel.MATH


def _cudnn_takes(call: AttentionCall, gpu: GpuTraits) -> bool:
    """`can_use_cudnn_attention`."""
    if call.dtype not in {"float16", "bfloat16"} or call.mask_requires_grad or call.key_len == 1:
        return False
    most = CUDNN_MAX_HEAD_DIM if gpu.major == 9 else CUDNN_MAX_HEAD_DIM // 2
    sizes = (call.head_dim, call.value_head_dim)
    return all(size % 8 == 0 and size <= most for size in sizes)


def _flash_takes(call: AttentionCall, gpu: GpuTraits) -> bool:
    """`can_use_flash_attention`."""
    if call.dtype not in {"float16", "bfloat16"} or gpu.major < 8 or call.has_mask:
        return False
    if call.head_dim != call.value_head_dim or call.head_dim > FLASH_MAX_HEAD_DIM:
        return False
    if call.is_causal and call.query_len != call.key_len:
        return False
    return not _narrow_backward(call, gpu)


def _narrow_backward(call: AttentionCall, gpu: GpuTraits) -> bool:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`: too little shared memory for it."""
    small_shared = (gpu.major == 8 and gpu.minor in {6, 9}) or gpu.major == 12
    if not (small_shared and call.requires_grad and call.head_dim > 192):
        return False
    return call.head_dim <= 224 or call.dropout > 0


def _efficient_takes(call: AttentionCall, gpu: GpuTraits) -> bool:
    """`can_use_mem_efficient_attention`."""
    wanted = {"float16", "bfloat16", "float32"} if gpu.major >= 8 else {"float16", "float32"}
    if call.dtype not in wanted or gpu.major < 5:
        return False
    if call.num_heads != call.num_kv_heads:
        return False
    align = _alignment(call.dtype, gpu)
    return call.head_dim % align == 0 and call.value_head_dim % align == 0


def _alignment(dtype: str, gpu: GpuTraits) -> int:
    """`minimum_gemm_alignment`: elements a head's size must be a multiple of."""
    half = dtype in {"float16", "bfloat16"}
    if gpu.major >= 8:
        return 8 if half else 4
    if gpu.major == 7:
        return 8 if half else 1
    return 1
