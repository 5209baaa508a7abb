"""Every place where torch, DeepSpeed or transformers is changed for the virtual GPU: what, why, until when.

Applied only in the estimator's child process, which then runs one plan and ends.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dstune.estimator.device import DEVICE_TYPE
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.sdpa import virtual_sdpa


@dataclass(frozen=True, slots=True)
class Patch:
    """One change.

    Attributes:
        target: `module:attribute.path` that is replaced.
        why: What goes wrong without it.
        until: What would make it unnecessary.
        make: Original object -> replacement.
    """

    target: str
    why: str
    until: str
    make: Callable[[Any, GpuTraits], Any]

    def apply(self, traits: GpuTraits) -> None:
        """Replace the target, if the installed version has it."""
        module_name, _, path = self.target.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError:
            return
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        if hasattr(owner, name):
            setattr(owner, name, self.make(getattr(owner, name), traits))


def _make_subclass(original: Any, _traits: GpuTraits) -> Any:
    def make(
        cls: type,
        data: torch.Tensor,
        require_grad: bool = False,
        *,
        dispatch_device: bool = False,
        device_for_backend_keys: torch.device | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        if device_for_backend_keys is not None and device_for_backend_keys.type == DEVICE_TYPE:
            device_for_backend_keys = torch.device("cpu")
        made: torch.Tensor = original(
            cls,
            data,
            require_grad,
            dispatch_device=dispatch_device,
            device_for_backend_keys=device_for_backend_keys,
            **rest,
        )
        return made

    return make


def _fake_data(_original: Any, _traits: GpuTraits) -> property:
    data: Any = torch._C.TensorBase.data

    def get(self: FakeTensor) -> Any:
        return data.__get__(self)

    def set_(self: FakeTensor, new: torch.Tensor) -> None:
        data.__set__(self, new)
        if isinstance(new, FakeTensor):
            self.fake_device = new.fake_device
        self._dstune_value = getattr(new, "_dstune_value", None)  # type: ignore[attr-defined]

    return property(get, set_)


def _swap_tensors(_original: Any, _traits: GpuTraits) -> Callable[[Any, Any], None]:
    def swap(first: Any, second: Any) -> None:
        first.data = second.data

    return swap


def _new_tensor(original: Any, _traits: GpuTraits) -> Any:
    def tensor(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
    ) -> torch.Tensor:
        if device is None or torch.device(device).type != DEVICE_TYPE:
            made: torch.Tensor = original(
                data, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory
            )
            return made
        return original(data, dtype=dtype).to(device).requires_grad_(requires_grad)  # type: ignore[no-any-return]

    return tensor


def _nothing(_original: Any, _traits: GpuTraits) -> Callable[..., None]:
    return lambda *_args, **_kwargs: None


def _false(_original: Any, _traits: GpuTraits) -> Callable[..., bool]:
    return lambda *_args, **_kwargs: False


def _builder(name: str) -> Callable[[Any, GpuTraits], Any]:
    def make(_original: Any, _traits: GpuTraits) -> Any:
        from dstune.estimator.opkernels import builder_for  # noqa: PLC0415 - imports torch's C++ helpers

        return builder_for(name)

    return make


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch:Tensor._make_subclass",
        "`param.data = other` needs compatible key sets, and PrivateUse1 is not among torch's dense backends, so fake "
        "tensors of the virtual GPU carry the CPU's backend keys",
        "PrivateUse1 is accepted by `has_compatible_shallow_copy_type`",
        _make_subclass,
    ),
    Patch(
        "torch._subclasses.fake_tensor:FakeTensor.data",
        "`.data =` copies the meta tensor but not the fake device",
        "FakeTensor handles `.data` assignment across devices",
        _fake_data,
    ),
    Patch(
        "torch.utils:swap_tensors",
        "`Module.to()` swaps fake parameters, which weak references to them forbid",
        "`Module.to()` assigns `.data` for fake tensors",
        _swap_tensors,
    ),
    Patch(
        "torch:tensor",
        "a tensor from numbers would be made by a real kernel on the virtual GPU",
        "FakeTensorMode makes tensors from numbers on PrivateUse1",
        _new_tensor,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:_orig_torch_tensor",
        "`zero.Init` puts back the `torch.tensor` that it saw when it was imported",
        "zero.Init restores what it found when it was entered",
        _new_tensor,
    ),
    Patch(
        "torch:Tensor.record_stream",
        "has no fake kernel; streams order nothing here",
        "FakeTensor implements record_stream",
        _nothing,
    ),
    Patch(
        "torch.nn.functional:scaled_dot_product_attention",
        "PrivateUse1 takes the math path; CUDA chooses a fused kernel, which keeps far less for the backward",
        "torch can be asked for CUDA's choice for another device",
        virtual_sdpa,
    ),
    Patch(
        "deepspeed.ops.adam.fused_adam:FusedAdamBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("FusedAdamBuilder"),
    ),
    Patch(
        "deepspeed.ops.adam.cpu_adam:CPUAdamBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("CPUAdamBuilder"),
    ),
    Patch(
        "deepspeed.ops.lion.fused_lion:FusedLionBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("FusedLionBuilder"),
    ),
    Patch(
        "deepspeed.ops.lion.cpu_lion:CPULionBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("CPULionBuilder"),
    ),
    Patch(
        "deepspeed.ops.adagrad.cpu_adagrad:CPUAdagradBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("CPUAdagradBuilder"),
    ),
    Patch(
        "transformers.masking_utils:is_tracing",
        "transformers takes fake tensors for tracing and then builds masks that a real run does not",
        "transformers tells a fake device from tracing",
        _false,
    ),
)


def apply_all(traits: GpuTraits) -> None:
    """Change this process. One thread does the backward: a thread for the virtual GPU would crash at exit."""
    for patch in PATCHES:
        patch.apply(traits)
    torch.autograd.set_multithreading_enabled(False)
