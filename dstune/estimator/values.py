"""Real values beside fake tensors, where they decide what the code does next.

A fake tensor has a shape and no content. Masks, position ids, label counts and flags are small and computed from
constants, so their content is carried along on the CPU: `mask.all()`, `nonzero()` and `.item()` then answer as real
data would. A value is lost, never guessed, as soon as an operation mixes it with unknown content.

Known limitations: more than `MAX_ELEMENTS` elements are not carried; a collective leaves rank 0's value.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from dstune.vocab import Routing

MAX_ELEMENTS = 1 << 22
"""Most elements carried: 32 MiB of int64."""
MAX_FLOATS = 1 << 18
"""Constant floats carried: masks of ones, not weights."""
MAX_EXPERTS = 1024
"""`topk` over at most this many unknown numbers is taken for a router."""

aten = torch.ops.aten

_FILLED: dict[OpOverload, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros.default: lambda _args: 0,
    aten.ones.default: lambda _args: 1,
    aten.full.default: lambda args: args[1],
    aten.zeros_like.default: lambda _args: 0,
    aten.ones_like.default: lambda _args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda _args: 0,
    aten.new_ones.default: lambda _args: 1,
    aten.new_full.default: lambda args: args[2],
    aten.scalar_tensor.default: lambda args: args[0],
    aten.rand.default: lambda _args: 0.5,
}
"""Constructors of constant content, whatever their tensor arguments hold; a random number is its mean (layer drop)."""

_FILLS: dict[OpOverload, Callable[[tuple[Any, ...]], Any]] = {
    aten.zero_.default: lambda _args: 0,
    aten.fill_.Scalar: lambda args: args[1],
}
"""In-place operations that make content known, whatever it was."""

_FINITE_CHECKS = frozenset({aten._amp_foreach_non_finite_check_and_unscale_.default})
"""Operations that look for infinities: none is found, so the flag stays what it was."""

_WITHOUT_TENSORS = frozenset(
    {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.tril_indices.default}
)
"""Constructors computed from their numbers."""


def value_of(tensor: object) -> torch.Tensor | None:
    """The content of a tensor, or None if it is unknown."""
    if type(tensor) is torch.Tensor:
        return tensor if tensor.device.type == "cpu" and tensor.numel() <= MAX_ELEMENTS else None
    held: torch.Tensor | None = getattr(tensor, "_dstune_value", None)
    if held is not None and held.numel() and not held.untyped_storage().nbytes():
        return None  # a view of it was overwritten with unknown content: see `_forget`
    return held


def set_value(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Attach content to a fake tensor."""
    tensor._dstune_value = value  # type: ignore[attr-defined]


class Values:
    """Carries content along each operation.

    Args:
        routing: Which experts a router of unknown logits picks.

    Attributes:
        routed: Whether a router was met, so that the policy mattered.
    """

    def __init__(self, routing: Routing = Routing.BALANCED) -> None:
        self.routing = routing
        self.routed = False

    def carry(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Give an operation's results their content, where it follows from the arguments'."""
        if func is aten.topk.default:
            self._route(args, out)
            return
        fill = _FILLED.get(func)
        if fill is not None:
            most = MAX_FLOATS if isinstance(out, FakeTensor) and out.dtype.is_floating_point else MAX_ELEMENTS
            if isinstance(out, FakeTensor) and out.numel() <= most:
                with unset_fake_temporarily():
                    set_value(out, aten.full(out.shape, fill(args), dtype=out.dtype, device="cpu"))
            return
        if func in _FINITE_CHECKS:
            return
        if func in _FILLS:
            self._refill(args[0], _FILLS[func](args))
            return
        known = _all_known(args, kwargs)
        if known is None and func in _WITHOUT_TENSORS:
            known = True
        if known:
            self._mirror(func, args, kwargs, out)
        elif known is False and func._schema.is_mutable:
            _forget(func, args, kwargs)

    def compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The real result of an operation on known content, or None if any is unknown."""
        if not _all_known(args, kwargs):
            return None
        with unset_fake_temporarily():
            return func(*tree_map(_real, args), **_on_cpu(kwargs))

    def _route(self, args: tuple[Any, ...], out: object) -> None:
        """Content for the indices of a `topk` on unknown values, by policy.

        A router has a row for each token. A single row is a choice among all columns of a parameter, as ZenFlow makes
        it: spread over the ranks, or in the worst case all of this rank's.
        """
        scores, k = args[0], args[1]
        is_router = scores.dim() > 1
        if scores.dim() == 0 or (is_router and value_of(scores) is not None):
            return
        indices, width = out[1], scores.shape[-1]  # type: ignore[index]
        if indices.numel() > MAX_ELEMENTS or (is_router and width > MAX_EXPERTS):
            return
        self.routed = self.routed or is_router
        with unset_fake_temporarily():
            slots = aten.arange(indices.numel(), device="cpu").reshape(indices.shape)
            spread_out = slots % width if is_router else slots * width // k
            set_value(indices, spread_out if self.routing is Routing.BALANCED else slots % k)

    def _refill(self, tensor: Any, fill: Any) -> None:
        held = value_of(tensor)
        if held is not None:
            with unset_fake_temporarily():
                held.fill_(fill)

    def _mirror(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        results = list(_tensors(out))
        if not results or any(not _is_small(result) for result in results):
            _forget(func, args, kwargs)
            return
        try:
            with unset_fake_temporarily():
                real = func(*tree_map(_real, args), **_on_cpu(kwargs))
        except NotImplementedError:  # CUDA has the operation for this type, the CPU has not: content is unknown
            return
        for result, value in zip(results, _tensors(real), strict=True):
            if isinstance(result, FakeTensor):
                result.constant = None  # torch's own, for single elements, would run real kernels on the device
                set_value(result, value)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= MAX_ELEMENTS


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    """Tensors among arguments or results: at most lists of them, never deeper."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)


def _all_known(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Whether every tensor argument has known content; None if there is none."""
    known = None
    for tensor in _tensors(args):
        if value_of(tensor) is None:
            return False
        known = True
    for tensor in _tensors(tuple(kwargs.values())):
        if value_of(tensor) is None:
            return False
        known = True
    return known


def _forget(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An operation wrote unknown content into its mutable arguments."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in _tensors(named.get(argument.name)):
                held = value_of(tensor)
                if isinstance(tensor, FakeTensor) and held is not None:
                    held.untyped_storage().resize_(0)  # so that all its views forget as well


def _real(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return value_of(item)
    if isinstance(item, torch.device):
        return torch.device("cpu")
    return item


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {name: tree_map(_real, item) for name, item in kwargs.items()}
    if changed.get("device") is not None:
        changed["device"] = torch.device("cpu")
    changed.pop("pin_memory", None)
    return changed
