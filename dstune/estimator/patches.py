"""Every place where torch, DeepSpeed or transformers is changed for the virtual GPU: what, why, until when.

Applied only in the estimator's child process, which then runs one plan and ends.
"""

import builtins
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dstune.estimator import autocast
from dstune.estimator.device import DEVICE_TYPE
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.nvme import without_disk, without_removal
from dstune.estimator.sdpa import virtual_sdpa
from dstune.estimator.superoffload import InProcessOptimizer


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
        original = getattr(owner, name, getattr(builtins, name, None))
        if original is not None:
            setattr(owner, name, self.make(original, traits))


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
        if device is None or torch.device(device).type not in {DEVICE_TYPE, "cuda"}:
            made: torch.Tensor = original(
                data, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory
            )
            return made
        return original(data, dtype=dtype).to(DEVICE_TYPE).requires_grad_(requires_grad)  # type: ignore[no-any-return]

    return tensor


def _without_batch_check(original: Any, _traits: GpuTraits) -> Callable[[Any, Any], None]:
    def configure(engine: Any, model: torch.nn.Module) -> None:
        original(engine, model)
        engine.first_dataloader_check.remove()

    return configure


def _even_vocabulary(_original: Any, _traits: GpuTraits) -> Callable[..., int]:
    def global_size(local_size: int, _start: int, _end: int, group: Any, _device: torch.device) -> int:
        return local_size * (1 if group is None else torch.distributed.get_world_size(group))

    return global_size


def _indexed(original: Any, _traits: GpuTraits) -> Callable[..., Any]:
    """For `__getitem__` and `__setitem__`."""

    def access(self: torch.Tensor, index: Any, *value: Any) -> Any:
        if self.device.type == DEVICE_TYPE:
            if isinstance(index, list):
                index = torch.tensor(index, device=DEVICE_TYPE)
            elif isinstance(index, tuple) and any(isinstance(part, list) for part in index):
                index = tuple(torch.tensor(i, device=DEVICE_TYPE) if isinstance(i, list) else i for i in index)
        return original(self, index, *value)

    return access


def _autocast_init(original: Any, _traits: GpuTraits) -> Callable[..., None]:
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type in {DEVICE_TYPE, "cuda"}:
            device_type, dtype = autocast.STANDS_IN, dtype or torch.float16  # CUDA's default
        original(self, device_type, dtype, *args, **kwargs)

    return init


def _numbered(_original: Any, _traits: GpuTraits) -> Callable[[Any], int]:
    numbers = itertools.count()

    def number(self: Any) -> int:
        held: int | None = self.__dict__.get("_dstune_number")
        if held is None:
            held = self._dstune_number = next(numbers)
        return held

    return number


def _of_stand_in(original: Any, _traits: GpuTraits) -> Callable[..., Any]:
    def ask(device_type: str = DEVICE_TYPE) -> Any:
        return original(autocast.STANDS_IN if device_type in {DEVICE_TYPE, "cuda"} else device_type)

    return ask


def _forgetting(original: Any, _traits: GpuTraits) -> Callable[[], None]:
    def clear() -> None:
        original()
        autocast.forget_weights()

    return clear


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
        "torch:Tensor.__setitem__",
        "a list as an index is made a tensor by a real kernel on the virtual GPU",
        "FakeTensorMode makes tensors from indices on PrivateUse1",
        _indexed,
    ),
    Patch(
        "torch:Tensor.__getitem__",
        "a list as an index is made a tensor by a real kernel on the virtual GPU",
        "FakeTensorMode makes tensors from indices on PrivateUse1",
        _indexed,
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
        "deepspeed.runtime.engine:DeepSpeedEngine._configure_tensor_parallel_states",
        "AutoTP first compares the batch with those of the other ranks, which do not exist here",
        "the check can be switched off",
        _without_batch_check,
    ),
    Patch(
        "deepspeed.sequence.cross_entropy:_validate_vocab_shard_bounds",
        "AutoTP's loss asks the other ranks where their part of the vocabulary lies",
        "the fake process group answers for ranks that are alike",
        _even_vocabulary,
    ),
    Patch(
        "torch:autocast.__init__",
        "torch has lists of operations to cast for CUDA, none for PrivateUse1",
        "autocast's lists can be given to PrivateUse1 from Python",
        _autocast_init,
    ),
    Patch(
        "torch:Tensor.__hash__",
        "a tensor's hash is its address, so sets of parameters, which DeepSpeed walks, change order from run to run",
        "a tensor's hash does not depend on where it lies",
        _numbered,
    ),
    Patch(
        "torch:is_autocast_enabled",
        "code that leaves autocast for a moment asks whether it is on, such as rotary embeddings",
        "autocast's lists can be given to PrivateUse1 from Python",
        _of_stand_in,
    ),
    Patch(
        "torch:clear_autocast_cache",
        "the cache of cast weights is our own",
        "autocast's lists can be given to PrivateUse1 from Python",
        _forgetting,
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
        "deepspeed.ops.op_builder:QuantizerBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("QuantizerBuilder"),
    ),
    Patch(
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper:AsyncIOBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("AsyncIOBuilder"),
    ),
    Patch(
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncIOBuilder",
        "bound at import to the builder of the accelerator found then",
        "DeepSpeed looks builders up when they are used",
        _builder("AsyncIOBuilder"),
    ),
    Patch(
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:os",
        "NVMe offload makes its folders while it sets up; an estimate must leave the disk alone",
        "DeepSpeed makes its folders on the first write",
        lambda module, _traits: without_disk(module),
    ),
    Patch(
        "deepspeed.runtime.swap_tensor.optimizer_utils:os",
        "NVMe offload makes its folders while it sets up; an estimate must leave the disk alone",
        "DeepSpeed makes its folders on the first write",
        lambda module, _traits: without_disk(module),
    ),
    Patch(
        "deepspeed.runtime.zero.stage3:os",
        "NVMe offload makes its folders while it sets up; an estimate must leave the disk alone",
        "DeepSpeed makes its folders on the first write",
        lambda module, _traits: without_disk(module),
    ),
    Patch(
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:shutil",
        "NVMe offload first removes what an earlier run left, which may be a run that is going on",
        "DeepSpeed makes its folders on the first write",
        lambda module, _traits: without_removal(module),
    ),
    Patch(
        "deepspeed.runtime.superoffload.superoffload_stage3:_validate_superoffload_accelerator",
        "SuperOffload insists on a device named cuda",
        "SuperOffload asks for abilities, not for a name",
        _nothing,
    ),
    Patch(
        "deepspeed.runtime.superoffload.superoffload_stage3:SuperOffloadCPUOptimizer",
        "its optimizer is another process, which fake tensors cannot enter",
        "SuperOffload can run its optimizer in the same process",
        lambda _original, _traits: InProcessOptimizer,
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
    autocast.register()
    torch.autograd.set_multithreading_enabled(False)
