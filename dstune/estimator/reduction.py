"""The global buffer of a CUDA reduction that is split over thread blocks: pure numbers, no torch.

Follows `setReduceConfig` and `ReduceConfig` of torch 2.11 `aten/src/ATen/native/cuda/Reduce.cuh`: when there are few
results and many inputs, several blocks share a result and meet in a buffer of accumulators with semaphores beside it.
"""

from dataclasses import dataclass

from dstune.estimator.gpu import GpuTraits

MAX_THREADS = 512
"""`mnt_wrapper::MAX_NUM_THREADS`."""
WARP = 32
VECTOR = 4
"""Inputs loaded at once (`vt0`, `input_vec_size`)."""
MIN_VALUES, MAX_VALUES = 16, 256
"""`min_values_per_thread`, `max_values_per_thread`."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of the iteration: elements, stride of the input in elements, whether it is reduced."""

    size: int
    stride: int
    reduced: bool


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a reduction takes, in bytes; nothing if each result has a block of its own."""

    accumulators: int = 0
    semaphores: int = 0


def iteration_dims(shape: list[int], strides: list[int], reduced: set[int]) -> list[Dim]:
    """Dimensions as TensorIterator orders and joins them: reduced ones first, each group by stride."""
    dims = [
        Dim(size, stride, index in reduced) for index, (size, stride) in enumerate(zip(shape, strides, strict=True))
    ]
    ordered = sorted((dim for dim in dims if dim.size != 1), key=lambda dim: (not dim.reduced, dim.stride))
    joined: list[Dim] = []
    for dim in ordered:
        last = joined[-1] if joined else None
        if last is not None and last.reduced == dim.reduced and last.size * last.stride == dim.stride:
            joined[-1] = Dim(last.size * dim.size, last.stride, last.reduced)
        else:
            joined.append(dim)
    return joined


def buffers(dims: list[Dim], accumulator_bytes: int, gpu: GpuTraits) -> Buffers:
    """The buffers of one reduction.

    Args:
        dims: From `iteration_dims`.
        accumulator_bytes: Size of the type that is accumulated in.
        gpu: Decides how many blocks fit.
    """
    num_outputs = _product(dim.size for dim in dims if not dim.reduced)
    num_inputs = _product(dim.size for dim in dims if dim.reduced)
    reduced = [dim for dim in dims if dim.reduced]
    kept = [dim for dim in dims if not dim.reduced]
    along_input = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    dim0, dim1 = (num_inputs, num_outputs) if along_input else (num_outputs, num_inputs)
    fastest = (reduced[0] if along_input else kept[0]) if dims else None
    vector = 1
    if fastest is not None and fastest.stride == 1:
        if along_input and dim0 >= 128 and len(reduced) == 1:
            dim0 //= VECTOR
        elif not along_input:
            vector = _output_vector(kept, reduced)
            dim0 //= vector
    width, height = _block(dim0, dim1, MAX_THREADS // vector)
    step_input = width if along_input else 1
    step_output = 1 if along_input else width
    if -(-num_inputs // step_input) < min(height * 16, MAX_VALUES):
        return Buffers()
    step_input *= height
    values = -(-num_inputs // step_input)
    grid = -(-(num_outputs // vector) // step_output)
    target = gpu.num_multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
    if values < MAX_VALUES or grid > target:
        return Buffers()
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return Buffers()
    size = accumulator_bytes * num_outputs * blocks * (1 if along_input else width * vector)
    return Buffers(size, 4 * grid)


def _output_vector(kept: list[Dim], reduced: list[Dim]) -> int:
    """`get_output_vec_size`: the largest power of two that divides the kept dimension and all strides."""
    vector = VECTOR
    while vector > 1 and (kept[0].size % vector or any(dim.stride % vector for dim in (*reduced, *kept[1:]))):
        vector //= 2
    return vector


def _block(dim0: int, dim1: int, max_threads: int) -> tuple[int, int]:
    """`set_block_dimension`: width and height of a thread block."""
    width0 = _last_pow2(dim0) if dim0 < max_threads else max_threads
    height0 = _last_pow2(dim1) if dim1 < max_threads else max_threads
    width = min(width0, WARP)
    height = min(height0, max_threads // width)
    return min(width0, max_threads // height), height


def _last_pow2(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def _product(numbers: object) -> int:
    product = 1
    for number in numbers:  # type: ignore[attr-defined]
        product *= number
    return product
