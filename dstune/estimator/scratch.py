"""What CUDA kernels allocate beside their results, and in which order: a table with a source for each row.

Sources are files of torch 2.11; every row was seen in event lists recorded on an H200, except where it says otherwise.

Known limitations: not all convolution workspaces of cuDNN are known (see `convolution`).
"""

from collections.abc import Iterator
from typing import Any

import torch

from dstune.estimator import convolution
from dstune.estimator.attentionscratch import ATTENTION
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.reduction import buffers, iteration_dims
from dstune.estimator.steps import Args, Scratch, Step, give, result, size_of, take

SCAN_BYTES, SCAN_TILE = 1023, 256
"""The least that a scan takes, and up to how many elements a sum is one tile: 8 and 16 were recorded, then 2,048."""
SORT_TILE, SORT_TILE_BYTES = 3072, 3583
"""Keys that one block sorts, and what it takes."""
INDEX_BYTES = 8
"""An int64."""
GROUP_BYTES = 60
"""For each group of a grouped product: pointers, strides and problem size (`GroupMM.cu`; recorded with 8 and 16)."""
EMBEDDING_SIMPLE_MAX = 3072
"""Up to this many indices no sort is needed (`native/cuda/Embedding.cu`, `embedding_dense_backward_cuda`)."""
EMBEDDING_ROWS = 10
"""Indices a thread sums (`native/cuda/EmbeddingBackwardKernel.cu`, `NROWS_PER_THREAD`)."""


def cublaslt_takes(name: str, args: Args) -> bool:
    """Whether a matrix product goes through cublasLt, which fuses the bias.

    Source: `native/cuda/Blas.cpp` (`isInputCompliesAddmmCudaLt`): a contiguous vector for a bias.
    """
    return name == "aten::addmm" and args[0].dim() == 1 and args[0].is_contiguous()


def _dropout(_args: Args, _kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/Dropout.cu` (`dropout_cuda`): the mask comes first."""
    yield result(1)
    yield result(0)


def _cumsum(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/ReduceOps.cpp` (`impl_func_cum_ops`) converts the input; one row goes through cub's scan."""
    yield result(0)
    if args[0].dtype != out.dtype:
        yield take(size_of(out), 1)
    if out.dim() and out.numel() == out.shape[args[1]]:
        yield take(SCAN_BYTES if out.numel() <= SCAN_TILE else scan_bytes(out.numel()), 2)
        yield give(2)


def _softmax_backward(_args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/SoftMax.cu` (`softmax_backward_cuda_out`): the product of gradient and output."""
    yield result(0)
    yield take(size_of(out))


def scan_bytes(count: int) -> int:
    """What cub's scan over this many elements takes (`cub::DeviceScan`; fitted to 2,048 to 262,144, recorded)."""
    return SCAN_BYTES + 256 * -(-count // 65_536)


def sort_bytes(count: int, num_bits: int = 64) -> int:
    """What cub's radix sort of int64 pairs takes (`cub::DeviceRadixSort`).

    Other buffers, counts for each tile, and a histogram for each 8 bits. Fitted to 4,096, 147,456 and 262,144 whole
    keys, and 4,096 keys of 12 bits, recorded; exact on all. Few keys (2,401 were recorded) are one tile.
    """
    if count <= SORT_TILE:
        return SORT_TILE_BYTES
    return 2 * INDEX_BYTES * count + 511 + 2048 * -(-num_bits // 8) + 1024 * -(-count // 4608)


def _embedding_backward(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/Embedding.cu` and `EmbeddingBackwardKernel.cu`: many indices are sorted and summed by segments.

    Whether a segment's rows are summed piece by piece or at once is told apart by rows a segment: recorded tables of
    2 and 32 rows take the second way, vocabularies the first.
    """
    grad, indices = args[0], args[1]
    count = indices.numel()
    if count <= EMBEDDING_SIMPLE_MAX:
        yield result(0)
        return
    num_bytes = count * INDEX_BYTES
    if not grad.is_contiguous():
        yield take(size_of(grad), 20)
    if not indices.is_contiguous():
        yield take(num_bytes, 21)
    for number in (1, 2, 3):
        yield take(num_bytes, number)
    yield from (take(sort_bytes(count), 4), give(4), give(3), result(0))
    segments = min(count, out.shape[0])
    yield take(num_bytes, 5)
    yield take(INDEX_BYTES, 6)
    yield from (take(num_bytes, 7), take(scan_bytes(count), 8), give(8), give(7))
    yield take(segments * INDEX_BYTES, 9)
    yield take(segments * INDEX_BYTES, 10)
    yield from (take(scan_bytes(segments), 11), give(11))
    yield take(INDEX_BYTES, 12)
    partial = count // EMBEDDING_ROWS + segments
    yield take(partial * INDEX_BYTES, 13)
    if count // EMBEDDING_ROWS <= segments:
        yield take(partial * out.shape[1] * 4, 14)
        yield give(14)
    else:
        yield take(partial * INDEX_BYTES, 15)
        if out.dtype != torch.float32:
            yield from (take(segments * out.shape[1] * 4, 14), give(14))
        yield give(15)
    yield give(13)


def _roll(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/TensorTransformations.h` (`roll_common`): one dimension after the other, each into a fresh tensor."""
    for number in range(len(args[1]) - 1):
        yield take(size_of(out), number)
        if number:
            yield give(number - 1)
    yield result(0)


def _layer_norm_backward(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/layer_norm_kernel.cu` (`LayerNormBackwardKernelImpl`): the gradient is copied after the results."""
    yield from (result(index) for index, item in enumerate(item for item in out if item is not None))
    if not args[0].is_contiguous():
        yield take(size_of(args[0]))


def _safe_softmax(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/transformers/attention.cpp` (`_safe_softmax`): rows that are wholly masked are looked for."""
    yield result(0)
    yield take(out.numel(), 1)
    yield take(out.numel() // max(1, out.shape[args[1]]), 2)
    yield from (take(out.element_size(), 3), give(3), give(2), give(1))


def _sort(_args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/Sort.cpp`: values, indices, and a range of indices."""
    yield from (result(0), result(1), take(size_of(out[1])))


def _grouped_mm(args: Args, kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/GroupMM.cu`: pointers and shapes of each group, and cutlass's workspace."""
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = args[0].shape[0] if offsets is None else offsets.shape[0]
    yield from (result(0), take(GROUP_BYTES * groups, 1), take(67_584, 2), give(2), give(1))


def _index_put(args: Args, kwargs: dict[str, Any], _out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/Indexing.cu` (`index_put_with_sort_kernel`): bounds of indices are looked at, then places sorted."""
    yield result(0)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    if not accumulate or any(index.dtype == torch.bool for index in indices):
        return
    for _ in range(2 * len(indices)):
        yield from (take(INDEX_BYTES, 1), take(1, 2), give(2), give(1))
    count = max(index.numel() for index in indices)
    rows = 1
    for size, index in zip(args[0].shape, args[1], strict=False):
        rows *= size if index is not None else 1
    size = count * INDEX_BYTES
    yield from (take(size, 1), take(size, 2), give(1))
    if not args[2].is_contiguous():
        yield take(size_of(args[2]), 7)
    yield from (take(size, 3), take(size, 4), take(size, 5))
    yield from (take(sort_bytes(count, max(1, rows.bit_length())), 6), give(6), give(5), give(4), give(3))


def _convolution(args: Args, _kwargs: dict[str, Any], out: Any, _gpu: GpuTraits) -> Iterator[Step]:
    """`native/cudnn/Conv_v8.cpp` (`run_conv_plan`): the result, then the plan's workspace."""
    image, weight = args[0], args[1]
    yield result(0)
    if convolution.transposes(args[8], is_contiguous=image.is_contiguous()):
        yield take(convolution.forward_bytes(image.numel(), out.numel(), weight.shape, image.element_size()))


def _convolution_backward(args: Args, _kwargs: dict[str, Any], _out: Any, gpu: GpuTraits) -> Iterator[Step]:
    """`native/Convolution.cpp` (`convolution_backward`): the gradient made contiguous, then each gradient.

    The image's and the weight's come from `native/cudnn/Conv_v8.cpp`, the bias's is a sum.
    """
    grad, image, weight, mask = args[0], args[1], args[2], args[10]
    if not grad.is_contiguous():
        yield take(size_of(grad), 9)
    copies = convolution.transposes(args[9], is_contiguous=image.is_contiguous())
    sizes = (image.numel(), grad.numel(), weight.shape, image.element_size())
    number = 0
    for wanted, workspace in zip(
        mask, (convolution.image_gradient_bytes, convolution.weight_gradient_bytes), strict=False
    ):
        if wanted:
            yield result(number)
            number += 1
            if copies:
                yield from (take(workspace(*sizes), 1), give(1))
    if mask[2]:
        yield result(number)
        yield from _meeting_place((grad, [0, *range(2, grad.dim())]), {}, max(4, grad.element_size()), gpu)


def _reduce(args: Args, kwargs: dict[str, Any], out: Any, gpu: GpuTraits) -> Iterator[Step]:
    """`native/cuda/Reduce.cuh`: sums, means and norms; halves accumulate in float32 (`at::opmath_type`)."""
    source = args[0]
    yield result(0)
    if source.dtype in {torch.bool, torch.int32, torch.uint8} and out.dtype == torch.int64:
        yield take(size_of(source, INDEX_BYTES), 1)  # `native/ReduceOps.cpp` sums integers as int64
    accumulator_bytes = max(4, source.element_size(), out.element_size() if out.dtype == torch.float64 else 0)
    yield from _meeting_place(args, kwargs, accumulator_bytes, gpu)


def _reduce_keeping_type(args: Args, kwargs: dict[str, Any], _out: Any, gpu: GpuTraits) -> Iterator[Step]:
    """Maxima and minima, `native/cuda/ReduceMaxValuesKernel.cu`: the accumulator is the type itself."""
    yield result(0)
    yield from _meeting_place(args, kwargs, args[0].element_size(), gpu)


def _meeting_place(args: Args, kwargs: dict[str, Any], accumulator_bytes: int, gpu: GpuTraits) -> Iterator[Step]:
    """A buffer and semaphores, where thread blocks share results."""
    source = args[0]
    dims = iteration_dims(list(source.shape), list(source.stride()), _reduced(args, kwargs, source.dim()))
    found = buffers(dims, accumulator_bytes, gpu)
    if found.accumulators:
        yield from (take(found.accumulators, 2), take(found.semaphores, 3), give(3), give(2))


def _reduced(args: Args, kwargs: dict[str, Any], num_dims: int) -> set[int]:
    """Dimensions that are reduced: all, unless the call names some."""
    named = kwargs.get("dim", next((arg for arg in args[1:] if isinstance(arg, (list, tuple))), None))
    if named is None or len(named) == 0:
        return set(range(num_dims))
    return {dim % num_dims for dim in named}


SCRATCH: dict[str, Scratch] = {
    **ATTENTION,
    "aten::native_dropout": _dropout,
    "aten::cumsum": _cumsum,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::sort": _sort,
    "aten::roll": _roll,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_grouped_mm": _grouped_mm,
    "aten::index_put": _index_put,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::sum": _reduce,
    "aten::mean": _reduce,
    "aten::linalg_vector_norm": _reduce,
    "aten::amax": _reduce_keeping_type,
    "aten::amin": _reduce_keeping_type,
}
"""Operation's name -> what happens inside it on CUDA."""

CONTIGUOUS_FIRST: dict[str, tuple[int, ...]] = {
    "aten::native_layer_norm": (0,),  # native/cuda/layer_norm_kernel.cu (`layer_norm_cuda`)
    "aten::native_layer_norm_backward": (1,),  # the same (`layer_norm_backward_cuda`)
    "aten::native_group_norm": (0,),  # native/group_norm.cpp
    "aten::_softmax": (0,),  # native/cuda/SoftMax.cu (`host_softmax`)
    "aten::_log_softmax": (0,),  # the same
    "aten::_softmax_backward_data": (0, 1),  # the same (`host_softmax_backward`)
    "aten::_log_softmax_backward_data": (0, 1),  # the same
}
"""Operation's name -> arguments that it copies first where they are not contiguous."""
