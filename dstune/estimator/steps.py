"""What happens inside an operation on CUDA: the words in which `scratch` and `attentionscratch` say it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from dstune.estimator.gpu import GpuTraits


class Step(NamedTuple):
    """One allocation or free inside an operation: a result, a scratch block taken, or one given back."""

    result: int | None = None
    is_on_host: bool = False
    size_bytes: int = 0
    number: int = 0
    frees: int | None = None


def result(index: int) -> Step:
    """The operation's result of that index is allocated now."""
    return Step(result=index)


def on_host(index: int) -> Step:
    """The operation's result of that index lies on the host, whatever its fake says."""
    return Step(result=index, is_on_host=True)


def take(size_bytes: int, number: int = 0) -> Step:
    """A scratch block is taken; it is given back by `give` or at the operation's end."""
    return Step(size_bytes=size_bytes, number=number)


def give(number: int = 0) -> Step:
    """A scratch block is given back."""
    return Step(frees=number)


Args = tuple[Any, ...]
Scratch = Callable[[Args, dict[str, Any], Any, GpuTraits], Iterator[Step]]
"""Arguments, keyword arguments, results and the GPU -> what is allocated and freed, in order."""


def size_of(tensor: torch.Tensor, element_bytes: int | None = None) -> int:
    """Bytes of a tensor's elements, or of as many others."""
    return tensor.numel() * (element_bytes or tensor.element_size())
