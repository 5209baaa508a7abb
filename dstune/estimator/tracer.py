"""Writes the tape: sees every storage that is born on the virtual GPU or the host, and when its last owner lets go.

Known limitations: a storage is seen as the result of an operation, so what a kernel takes and gives back inside is
known only from the table in `scratch`.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dstune.errors import UnsupportedOperationError
from dstune.estimator.allocator import round_size
from dstune.estimator.device import DEVICE_TYPE, Stream
from dstune.estimator.dispatchcache import DispatchCache
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.modules import ModuleStack
from dstune.estimator.scratch import CONTIGUOUS_FIRST, SCRATCH, cublaslt_takes
from dstune.estimator.steps import Step
from dstune.estimator.tape import HOST_LOCKED, HOST_PAGEABLE, HOST_PINNED, Tape
from dstune.estimator.values import Values, set_value, value_of

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
_META = torch.device("meta")

MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Operations that take a cuBLAS handle, and with it a workspace."""
SCALAR_READS = frozenset({aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default})
"""Operations that bring one element to Python."""
UNKNOWN_SCALARS: dict[torch.dtype, bool | int] = {torch.bool: False}
"""What `.item()` answers to DeepSpeed and torch when content is unknown: no overflow, count 0; floats are 1.0."""
TRUSTED_CALLERS = ("torch", "deepspeed")
"""Packages whose `.item()` on unknown content only steers loss scaling, clipping and logging. While the model is
built everybody is trusted: initial values do not change shapes."""


class Tracer(TorchDispatchMode):
    """Records one rank.

    Args:
        traits: The GPU that is pretended.
        values: Carries small tensors' content.
        report_fault: Called with a fault inside a backward; it may not return.
        cache: Results of operations seen before, or None to ask torch every time.

    Attributes:
        tape: What was recorded.
        phase: `build`, `forward`, `backward` or `step`; decides whose cuBLAS handle is used.
        num_ops: Operations seen.
        allocated_bytes: On the virtual GPU, now.
    """

    def __init__(
        self,
        traits: GpuTraits,
        values: Values,
        report_fault: Callable[[BaseException], object],
        cache: DispatchCache | None = None,
    ) -> None:
        super().__init__()
        self._cache = cache
        self._report_fault = report_fault
        self.tape = Tape()
        self.modules = ModuleStack()
        self.phase = "build"
        self.num_ops = 0
        self.allocated_bytes = 0
        self._traits = traits
        self._values = values
        self._live: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self._gpu_sizes: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._host_kind = HOST_PAGEABLE
        self._workspaces: set[object] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around each operation: nothing is compiled here."""
        return False

    # -- storages ------------------------------------------------------------------------------------------------
    def born(self, tensor: torch.Tensor, label: int, *, is_on_host: bool = False) -> None:
        """Record the storage of an operation's result, unless it is known already."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        size = storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] == size:
                return
            self._died(key, known[2])  # resized: the old block goes, a new one comes
        if size == 0:
            return
        device = "cpu" if is_on_host else tensor.device.type
        if device == DEVICE_TYPE:
            block = self.tape.alloc(size, Stream.current.number, label)
            self._gpu_sizes[block] = round_size(size)
            self.allocated_bytes += self._gpu_sizes[block]
        elif device == "cpu":
            block = self.tape.alloc(size, self._host_kind, label)
            if self._host_kind != HOST_PAGEABLE:
                self._pinned.add(key)
        elif device == "meta":
            return
        else:
            msg = f"a tensor is on device `{device}` in {self.modules.where()}"
            raise UnsupportedOperationError(msg, hint="create it on the device of the model's parameters")
        self._live[key] = (block, size, weakref.ref(storage, functools.partial(self._died, key)))

    def _died(self, key: int, ref: "weakref.ref[Any]") -> None:
        known = self._live.get(key)
        if known is None or known[2] is not ref:
            return
        del self._live[key]
        self._pinned.discard(key)
        self.tape.free(known[0])
        if known[0] in self._gpu_sizes:
            self.allocated_bytes -= self._gpu_sizes.pop(known[0])

    @contextlib.contextmanager
    def pinning(self, kind: int = HOST_PINNED) -> Iterator[None]:
        """Host tensors born inside are pinned, by torch or else."""
        before, self._host_kind = self._host_kind, kind
        try:
            yield
        finally:
            self._host_kind = before

    @contextlib.contextmanager
    def locking(self) -> Iterator[None]:
        """Host tensors born inside are page-locked outside torch's cache."""
        with self.pinning(HOST_LOCKED):
            yield

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor was born pinned."""
        return tensor.untyped_storage()._cdata in self._pinned

    # -- operations ----------------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: OpOverload, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on fake tensors and record what it allocates."""
        if func is _DEVICE_OF:  # C++ asks a tensor for its device, more often than anything else
            tensor = args[0]
            if type(tensor) is FakeTensor:
                return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
        try:
            return self._dispatch(func, args, kwargs or {})
        except BaseException as error:
            if self.phase == "backward":
                self._report_fault(error)  # C++ would end the process, and the reason would be lost
            raise

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_ops += 1
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # code that names CUDA means the GPU that it runs on
            kwargs = {**kwargs, "device": torch.device(DEVICE_TYPE)}
        name = func._schema.name
        if func in SCALAR_READS:
            return self._scalar(args[0])
        label = self.tape.label(f"{name} {self.modules.path}")
        copied = CONTIGUOUS_FIRST.get(name)
        if copied is not None and any(not args[n].is_contiguous() and _on_gpu(args, None) for n in copied):
            with self:
                args = tuple(
                    arg.contiguous() if number in copied and not arg.is_contiguous() else arg
                    for number, arg in enumerate(args)
                )
        in_place = _is_in_place(name, args)
        out = self._run(func, args, kwargs)
        if in_place:
            self._hand_over(args[0], out)
        scratch = SCRATCH.get(name)
        if scratch is not None and _on_gpu(args, out):
            self._take_scratch(scratch(args, kwargs, out, self._traits), out, label)
        self._record(out, label)
        if name in MATRIX_PRODUCTS:
            self._take_workspaces(name, args, label)
        return out

    def _hand_over(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """On CUDA the sum is written into the old tensor: its block lives on in the new one."""
        old_storage, new_storage = old.untyped_storage(), new.untyped_storage()
        known = self._live.pop(old_storage._cdata, None)
        if known is not None:
            key = new_storage._cdata
            self._live[key] = (known[0], known[1], weakref.ref(new_storage, functools.partial(self._died, key)))

    def _record(self, out: object, label: int) -> None:
        if isinstance(out, torch.Tensor):
            self.born(out, label)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._record(item, label)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._cache is None:
            return self._run_slowly(func, args, kwargs)
        out, is_made = self._cache.run(func, args, kwargs, self._run_slowly)
        if is_made:
            self._values.carry(func, args, kwargs, out)
        return out

    def _run_slowly(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let torch's fake dispatch find the result."""
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = self._run_on_values(func, args, kwargs)
        except (UnsupportedOperatorException, NotImplementedError) as error:
            msg = f"operation `{func}` in {self.modules.where()} has no fake kernel"
            raise UnsupportedOperationError(msg, hint=_HINT) from error
        self._values.carry(func, args, kwargs, out)
        return out

    def _run_on_values(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation whose result's shape depends on content: possible where the content is known."""
        if func is aten.index.Tensor:
            return self._index_by_mask(func, args)
        real = self._values.compute(func, args, kwargs)
        if real is None:
            msg = f"the shape of `{func}` in {self.modules.where()} depends on values that are not known"
            raise UnsupportedOperationError(msg, hint=_HINT)
        if not isinstance(real, torch.Tensor):
            return real
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=args[0].device)
        set_value(fake, real)
        return fake

    def _index_by_mask(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """`x[mask]`: CUDA turns the mask into indices first, and so does this."""
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                indices.append(index)
                continue
            if value_of(index) is None:
                msg = f"the shape of `{func}` in {self.modules.where()} depends on values that are not known"
                raise UnsupportedOperationError(msg, hint=_HINT)
            with self:
                indices.extend(index.nonzero().unbind(1))
        return func(args[0], indices)

    def _scalar(self, tensor: torch.Tensor) -> bool | float:
        """`.item()`, `bool(tensor)`, `float(tensor)`."""
        value = value_of(tensor)
        if value is not None:
            with unset_fake_temporarily():
                answer: bool | float = value.item()
            return answer
        caller = _calling_package()
        if self.phase != "build" and caller not in TRUSTED_CALLERS and not tensor.dtype.is_floating_point:
            msg = f"`{caller}` reads a value that is not known (`.item()` in {self.modules.where()})"
            raise UnsupportedOperationError(msg, hint=_HINT)
        return 1.0 if tensor.dtype.is_floating_point else UNKNOWN_SCALARS.get(tensor.dtype, 0)

    # -- what kernels take beside their results -------------------------------------------------------------------
    def _take_scratch(self, steps: Iterator[Step], out: Any, label: int) -> None:
        """Follow what an operation allocates and frees; what it does not free by itself is freed at its end."""
        results = [item for item in out if isinstance(item, torch.Tensor)] if isinstance(out, (tuple, list)) else [out]
        taken: dict[int, int] = {}
        for step in steps:
            if step.result is not None:
                self.born(results[step.result], label, is_on_host=step.is_on_host)
            elif step.frees is not None:
                self.tape.free(taken.pop(step.frees))
            else:
                taken[step.number] = self.tape.alloc(step.size_bytes, Stream.current.number, label)
        for block in taken.values():
            self.tape.free(block)

    def _take_workspaces(self, name: str, args: tuple[Any, ...], label: int) -> None:
        """CuBLAS keeps one workspace for each handle and stream; the backward's thread has a handle of its own."""
        if not _on_gpu(args, None):
            return
        stream = Stream.current.number
        thread = "backward" if self.phase == "backward" else "main"
        self._keep(("cublas", thread, stream), self._traits.cublas_workspace_bytes, stream, label)
        if cublaslt_takes(name, args):
            self._keep(("cublaslt", thread, stream), self._traits.cublaslt_workspace_bytes, stream, label)

    def _keep(self, key: object, size_bytes: int, stream: int, label: int) -> None:
        if key not in self._workspaces:
            self._workspaces.add(key)
            self.tape.alloc(size_bytes, stream, label)
            self.allocated_bytes += round_size(size_bytes)


_HINT = "no estimate can be given for a model that does this; replace the operation or measure on a GPU"


_OWN_STORAGE, _OWN_TENSOR = 2, 4
"""Use counts of a storage and a tensor that only the backward's input buffer holds, seen from inside a dispatch."""


IN_FORMULAS = frozenset(
    {"aten::scatter_add", "aten::index_put", "aten::index_add", "aten::scatter", "aten::index_copy"}
)
"""Operations that the backward's formulas run in place on fresh zeros, but out of place for tensor subclasses.

Source: torch 2.11 `torch/csrc/autograd/FunctionsManual.cpp` (`areAnyTensorSubclassLike`)."""


def _is_in_place(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the result is written into the first argument on CUDA, where a fake one gets storage of its own."""
    if name == "aten::add":
        return _accumulates(args) or _adds_mask(args)
    return name in IN_FORMULAS and args[0].device.type == DEVICE_TYPE and _called_by_engine()


def _adds_mask(args: tuple[Any, ...]) -> bool:
    """Whether attention's plain path adds a mask to its scores.

    Source: torch 2.11 `aten/src/ATen/native/transformers/attention.cpp` (`_scaled_dot_product_attention_math`).
    """
    old = args[0]
    return isinstance(old, torch.Tensor) and old.device.type == DEVICE_TYPE and _caller().endswith("estimator/sdpa.py")


def _accumulates(args: tuple[Any, ...]) -> bool:
    """Whether an addition is the backward's summing of gradients, which CUDA does in place where nobody else looks.

    For tensor subclasses the engine never works in place, so the fake sum must be told apart here.
    Source: torch 2.11 `torch/csrc/autograd/input_buffer.cpp` (`can_accumulate_inplace`).
    """
    old, new = args[0], args[1]
    if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)) or old.device.type != DEVICE_TYPE:
        return False
    if old.shape != new.shape or old.dtype != new.dtype or old._use_count() > _OWN_TENSOR:  # type: ignore[attr-defined]
        return False
    if torch._C._storage_Use_Count(old.untyped_storage()._cdata) > _OWN_STORAGE:
        return False
    return _called_by_engine() and _is_dense(old)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _called_by_engine() -> bool:
    """Whether C++ called, from inside a backward, rather than Python code."""
    frame = _calling_frame()
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _caller() -> str:
    """The file whose code called the operation."""
    frame = _calling_frame()
    return "" if frame is None else frame.f_code.co_filename


def _calling_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH_FILES):
        frame = frame.f_back
    return frame


_DISPATCH_FILES = ("estimator/tracer.py", "torch/_ops.py", "_compile.py", "eval_frame.py", "_python_dispatch.py")


def _on_gpu(args: tuple[Any, ...], out: object) -> bool:
    for item in (*args, out):
        if isinstance(item, torch.Tensor):
            return item.device.type == DEVICE_TYPE
    return False


def _calling_package() -> str:
    """The top package of the nearest frame outside torch's and dstune's dispatch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in {"torch", "dstune"}:
            return package
        frame = frame.f_back
    return "torch"
