"""Results of operations seen before, made without torch's fake dispatch: the same numbers, several times faster.

What a fake result looks like follows from the operation and the shapes, strides, types and devices of its arguments.
The first time torch's `FakeTensorMode` is asked; afterwards a result is built from what it said. Operations whose
results depend on content, that change a tensor's shape in place, or that share storage in a way not understood here are
never kept.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dstune.estimator.viewrules import RULES

UNKEPT_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
UNKEPT = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy", "aten::set_", "aten::resize_", "aten::_to_copy"})
"""Operations that attach content, change storage, or move tensors of one element with their content."""
EMPTY = torch.empty
EMPTY_STRIDED = torch.empty_strided
"""As they were at import: `deepspeed.zero.Init` puts its own functions in their place, which convert the type."""
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
LISTS = frozenset({list, tuple, torch.Size})

Key = tuple[Any, ...]


class Result(NamedTuple):
    """How to make one result.

    Attributes:
        same_as: The argument (counted flat) that is returned itself, or None.
        view_of: The argument whose storage is shared, or None for a fresh one.
        constant: A result that is no tensor.
    """

    same_as: int | None = None
    view_of: int | None = None
    constant: Any = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


class Entry(NamedTuple):
    """All results of one operation, and what they come in."""

    results: tuple[Result, ...]
    container: type | None


class DispatchCache:
    """What was learnt in one process.

    Args:
        mode: The fake mode that results belong to.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._entries: dict[Key, Entry | None] = {}
        self._kept: dict[int, bool] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}
        unsafe = mode._allow_unsafe_data_ptr_access
        self._guard_pointer = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr if unsafe else torch._C._set_throw_on_mutable_data_ptr
        )

    def run(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Callable[..., Any]
    ) -> tuple[Any, bool]:
        """The result of an operation, and whether it was made here.

        Args:
            func: The operation.
            args: Its positional arguments.
            kwargs: Its named arguments.
            ask: Has torch find the result, where it is not known.
        """
        view = self._view(func, args, kwargs)
        if view is not None:
            return view, True
        key = self._key(func, args, kwargs)
        if key is None:
            return ask(func, args, kwargs), False
        entry = self._entries.get(key)
        if entry is not None:
            return self._build(entry, args, kwargs), True
        out = ask(func, args, kwargs)
        self._learn(key, func, args, kwargs, out)
        return out, False

    def _key(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """What a result depends on, or None if it is not known to depend on nothing else."""
        kept = self._kept.get(id(func))
        if kept is None:
            kept = self._kept[id(func)] = _is_kept(func)
        if not kept:
            return None
        parts: list[Any] = [id(func)]
        if not _describe(args, parts):
            return None
        for name, item in kwargs.items():
            parts.append(name)
            if not _describe((item,), parts):
                return None
        return tuple(parts)

    def _view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensor | None:
        """The result of an operation that a rule covers, else None."""
        rule = RULES.get(func)
        if rule is None or kwargs or type(args[0]) is not FakeTensor or args[0].constant is not None:
            return None
        view = rule(*args)
        if view is None:
            return None
        return self._aliased(args[0], view.shape, view.stride, view.offset, args[0].dtype)

    def _build(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build the results of an operation."""
        made = [self._make(result, args, kwargs) for result in entry.results]
        return made[0] if entry.container is None else entry.container(made)

    def _learn(self, key: Key, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Remember what torch answered."""
        if key in self._entries:
            return
        flat = list(_tensors((*args, *kwargs.values())))
        items = out if type(out) in {list, tuple} else [out]
        results = [_result_of(item, flat) for item in items]
        fresh = [
            item.untyped_storage()._cdata
            for item, result in zip(items, results, strict=True)
            if result is not None and result.shape is not None and result.view_of is None
        ]
        changes = func._schema.is_mutable and any(r is not None and r.shape is not None for r in results)
        if changes or len(set(fresh)) != len(fresh) or any(result is None for result in results):
            self._entries[key] = None
            return
        container = type(out) if type(out) in {list, tuple} else None
        self._entries[key] = Entry(tuple(result for result in results if result is not None), container)

    def _make(self, result: Result, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if result.shape is None:
            return result.constant if result.same_as is None else _nth(args, kwargs, result.same_as)
        if result.view_of is not None:
            source = _nth(args, kwargs, result.view_of)
            return self._aliased(source, result.shape, result.stride, result.offset, result.dtype)
        with torch._C._DisableTorchDispatch():
            meta = EMPTY_STRIDED(result.shape, result.stride, dtype=result.dtype, device="meta")
        return self._fake(meta, result.device)

    def _aliased(
        self, source: FakeTensor, shape: Any, stride: Any, offset: int, dtype: torch.dtype | None
    ) -> FakeTensor:
        """A tensor on another's storage."""
        storage = source.untyped_storage()
        with torch._C._DisableTorchDispatch():
            meta = EMPTY((), dtype=dtype, device="meta")
            meta.set_(storage, offset, shape, stride)
        return self._fake(meta, source.fake_device)

    def _fake(self, meta: torch.Tensor, device: Any) -> FakeTensor:
        """A fake tensor around a meta tensor. The first of a device is torch's own, the others have its attributes."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self._mode, meta, device)
            self._attributes[device] = dict(first.__dict__)
            return first
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, require_grad=False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard_pointer(made)
        made.__dict__.update(attributes)
        return made


def _is_kept(func: OpOverload) -> bool:
    return (
        func.namespace == "aten"
        and not UNKEPT_TAGS.intersection(func.tags)
        and func._schema.name not in UNKEPT
        and not any(argument.name == "out" for argument in func._schema.arguments)
    )


def _describe(items: Any, parts: list[Any]) -> bool:
    """Append what identifies the arguments; False if one cannot be identified."""
    for item in items:
        kind = type(item)
        if kind is FakeTensor:
            if item.constant is not None:
                return False
            parts.append(item.shape)
            parts.append(item.stride())
            parts.append(item.storage_offset())
            parts.append(item.dtype)
            parts.append(item.fake_device)
        elif kind in PLAIN:
            parts.append(kind)
            parts.append(item)
        elif kind in LISTS:
            parts.append(len(item))
            if not _describe(item, parts):
                return False
        else:
            return False
    return True


def _tensors(items: Any) -> Iterator[FakeTensor]:
    for item in items:
        if type(item) is FakeTensor:
            yield item
        elif type(item) in LISTS:
            yield from _tensors(item)


def _nth(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> FakeTensor:
    if number == 0 and type(args[0]) is FakeTensor:
        return args[0]
    return list(_tensors((*args, *kwargs.values())))[number]


def _result_of(item: Any, flat: list[FakeTensor]) -> Result | None:
    """How to make an item again, or None if that is not understood."""
    if type(item) in PLAIN:
        return Result(constant=item)
    if type(item) is not FakeTensor or item.constant is not None or item.layout != torch.strided:
        return None
    if item.is_conj() or item.is_neg():
        return None
    for number, tensor in enumerate(flat):
        if item is tensor:
            return Result(same_as=number)
    storage = item.untyped_storage()
    view_of = next((n for n, tensor in enumerate(flat) if tensor.untyped_storage()._cdata == storage._cdata), None)
    made = Result(
        None, view_of, None, tuple(item.shape), item.stride(), int(item.storage_offset()), item.dtype, item.fake_device
    )
    if view_of is None and (made.offset or storage.nbytes() != _span(made) * item.element_size()):
        return None
    return made


def _span(result: Result) -> int:
    """Elements from the first to the last of a fresh result."""
    assert result.shape is not None
    if 0 in result.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(result.shape, result.stride, strict=True))
