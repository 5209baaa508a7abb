"""DeepSpeed's compiled operations, as far as they matter to memory: a table of what each one allocates.

An operation that is not listed is an error, never a silent nothing.
"""

from typing import Any

from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from dstune.errors import UnsupportedOperationError
from dstune.estimator import quantizer
from dstune.estimator.nvme import AioHandle


def _in_place(*_args: object, **_kwargs: object) -> int:
    """A kernel that works in place and allocates nothing."""
    return 0


KERNELS: dict[str, dict[str, Any]] = {
    # csrc/adam/multi_tensor_adam.cu: one launch over pointers, no scratch.
    "FusedAdamBuilder": {"multi_tensor_adam": _in_place},
    # csrc/lion/multi_tensor_lion.cu: the same.
    "FusedLionBuilder": {"multi_tensor_lion": _in_place},
    # csrc/adam/cpu_adam_impl.cpp: in place on the host.
    "CPUAdamBuilder": {
        "create_adam": _in_place,
        "adam_update": _in_place,
        "adam_rollback": _in_place,
        "destroy_adam": _in_place,
    },
    # csrc/adagrad/cpu_adagrad.cpp: in place on the host.
    "CPUAdagradBuilder": {"create_adagrad": _in_place, "adagrad_update": _in_place, "destroy_adagrad": _in_place},
    # csrc/lion/cpu_lion_impl.cpp: in place on the host.
    "CPULionBuilder": {"create_lion": _in_place, "lion_update": _in_place, "destroy_lion": _in_place},
    # csrc/quantization/pt_binding.cpp: results only.
    "QuantizerBuilder": {
        "quantize": quantizer.quantize,
        "dequantize": quantizer.dequantize,
        "swizzle_quant": quantizer.swizzle_quant,
        "quantized_reduction": quantizer.quantized_reduction,
        "Symmetric": quantizer.SYMMETRIC,
        "Asymmetric": quantizer.ASYMMETRIC,
    },
    # csrc/aio/py_lib: page-locked buffers on the host, files that are only counted.
    "AsyncIOBuilder": {"aio_handle": AioHandle},
    # csrc/utils/flatten_unflatten.cpp: torch's own functions.
    "UtilsBuilder": {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors},
}
"""Builder's class name -> what the module that it loads has."""

ABSENT = frozenset({"ShareMemCommBuilder", "CCLCommBuilder", "NotImplementedBuilder"})
"""Builders that CUDA's accelerator does not have either."""


class Kernels:
    """The module that a builder loads."""

    def __init__(self, builder: str) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kernel = KERNELS.get(self._builder, {}).get(name)
        if kernel is None:
            msg = f"DeepSpeed's compiled operation `{self._builder}.{name}` has no model on the virtual GPU"
            raise UnsupportedOperationError(msg, hint="choose another optimizer or switch the feature off")
        return kernel


def builder_for(class_name: str) -> type | None:
    """A builder class that loads stand-ins, or None where CUDA has none."""
    if class_name in ABSENT:
        return None

    def load(_self: object, *_args: object, **_kwargs: object) -> Kernels:
        return Kernels(class_name)

    def is_compatible(_self: object, *_args: object, **_kwargs: object) -> bool:
        return class_name in KERNELS

    def absolute_name(_self: object) -> str:
        return f"dstune.{class_name}"

    members = {"NAME": class_name, "load": load, "is_compatible": is_compatible, "absolute_name": absolute_name}
    return type(class_name, (), members)
