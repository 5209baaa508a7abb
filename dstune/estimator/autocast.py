"""CUDA's autocast on the virtual GPU: which operations cast what, and the cache of cast weights.

Fake tensors of the virtual GPU carry the CPU's backend keys (see `patches`), so autocast for it is the CPU's with the
lists of CUDA, which stand in `autocast.toml`. Arguments are cast from the last to the first, as the compiler evaluates
them in torch's build for Linux (recorded event lists show the weight's copy before the input's).
"""

import tomllib
import warnings
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch

from dstune.estimator.device import DEVICE_TYPE

STANDS_IN = "cpu"
"""The device type whose autocast state is used."""

_cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights that were cast, by identity, until the outermost autocast ends."""
_library: list[torch.library.Library] = []


def register() -> None:
    """Register CUDA's lists. Once a process."""
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the CPU's own lists are overridden on purpose
        for policy, names in tomllib.loads(files("dstune.estimator").joinpath("autocast.toml").read_text()).items():
            for name in names:
                library.impl(name, _POLICIES[policy](_overload(name)), "AutocastCPU")


def lowered(*args: Any) -> list[Any]:
    """Arguments in autocast's type, if it is on, for a function that is not dispatched."""
    if not torch.is_autocast_enabled(STANDS_IN):
        return list(args)
    return _cast_all(args, {}, torch.get_autocast_dtype(STANDS_IN))[0]


def forget_weights() -> None:
    """Drop the cache of cast weights."""
    _cached.clear()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _eligible(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == DEVICE_TYPE and item.is_floating_point()


def _cast(item: Any, dtype: torch.dtype) -> Any:
    """One argument; float64 stays, lists are cast item by item."""
    if isinstance(item, (list, tuple)):
        return type(item)(_cast(part, dtype) for part in item)
    if not _eligible(item) or item.dtype in {torch.float64, dtype}:
        return item
    is_weight = item.dtype == torch.float32 and item.requires_grad and item.is_leaf and not item._is_view()
    if not (is_weight and dtype != torch.float32 and torch.is_autocast_cache_enabled()):
        return item.to(dtype)
    if id(item) not in _cached:
        _cached[id(item)] = (item, item.to(dtype))
    return _cached[id(item)][1]


def _cast_all(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    named = {name: _cast(item, dtype) for name, item in reversed(kwargs.items())}
    return [_cast(item, dtype) for item in reversed(args)][::-1], named


def _lower(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            cast, named = _cast_all(args, kwargs, torch.get_autocast_dtype(STANDS_IN))
            return op(*cast, **named)

    return run


def _float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            cast, named = _cast_all(args, kwargs, torch.float32)
            return op(*cast, **named)

    return run


def _float32_result(op: Any) -> Callable[..., Any]:
    position = next(n for n, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        with _without_autocast():
            if given is not None or not _eligible(args[0]):
                return op(*args, **kwargs)
            return op(*args[:position], **{**kwargs, "dtype": torch.float32})

    return run


def _widest(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        flat = [part for item in args for part in (item if isinstance(item, (list, tuple)) else (item,))]
        widest = torch.get_autocast_dtype(STANDS_IN)
        if any(_eligible(item) and item.dtype == torch.float32 for item in flat):
            widest = torch.float32
        with _without_autocast():
            cast, named = _cast_all(args, kwargs, widest)
            return op(*cast, **named)

    return run


_POLICIES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "lower_precision": _lower,
    "float32": _float32,
    "float32_result": _float32_result,
    "widest": _widest,
}
"""Name of a list -> what is done with its operations."""
