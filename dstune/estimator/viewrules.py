"""Views whose shape follows from a few numbers: flat buffers are cut at thousands of places, so none is seen twice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class View(NamedTuple):
    """A view of the first argument: shape, strides and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _same(tensor: Any) -> View:
    """`detach` and `alias`."""
    return View(tensor.shape, tensor.stride(), tensor.storage_offset())


def _slice(tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> View | None:
    """`aten/src/ATen/native/TensorShape.cpp` (`slice`): bounds are clamped, from the end if negative."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    if not shape:
        return None
    size = shape[dim]
    first = _clamped(0 if start is None else start, size)
    last = max(first, _clamped(size if end is None else end, size))
    shape[dim] = -(-(last - first) // step)
    offset = tensor.storage_offset() + first * stride[dim]
    stride[dim] *= step
    return View(tuple(shape), tuple(stride), offset)


def _clamped(position: int, size: int) -> int:
    return min(max(position + size if position < 0 else position, 0), size)


def _reshaped(tensor: Any, size: Any) -> View | None:
    """`view` of what lies in one piece; anything else is left to torch."""
    if not tensor.is_contiguous():
        return None
    total = tensor.numel()
    known = 1
    for number in size:
        known *= number if number != -1 else 1
    shape = tuple(total // known if number == -1 and known else number for number in size)
    stride = []
    step = 1
    for number in reversed(shape):
        stride.append(step)
        step *= max(number, 1)
    made = 1
    for number in shape:
        made *= number
    return View(shape, tuple(reversed(stride)), tensor.storage_offset()) if made == total and total else None


RULES: dict[Any, Callable[..., View | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.slice.Tensor: _slice,
    aten.view.default: _reshaped,
}
"""Operation -> its view, or None where the rule does not hold."""
