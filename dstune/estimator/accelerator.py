"""DeepSpeed's accelerator for the virtual GPU: answers that choose code paths are CUDA's, memory goes to the tape.

Source of the answers: deepspeed 0.19.8 `accelerator/cuda_accelerator.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from dstune.estimator.device import DEVICE_TYPE, AnyStream, Event, Stream, use_stream
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.opkernels import builder_for
from dstune.estimator.tracer import Tracer


class VirtualAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """One GPU that computes nothing. DeepSpeed must find it while it is imported; a job binds it later."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        super().__init__()
        self._name = DEVICE_TYPE
        self._communication_backend_name = "fake"
        self._traits = GpuTraits(8, 0)
        self._total_bytes = 0
        self._num_devices = 1
        self._tracer: Tracer

    def bind(self, tracer: Tracer, traits: GpuTraits, total_bytes: int, num_devices: int) -> None:
        """Become the GPU of one job.

        Args:
            tracer: Where allocations are recorded.
            traits: The GPU that is pretended.
            total_bytes: Its memory, for code that asks.
            num_devices: GPUs of the node.
        """
        self._num_devices = num_devices
        self._tracer = tracer
        self._traits = traits
        self._total_bytes = total_bytes

    # -- which branches DeepSpeed takes --------------------------------------------------------------------------
    def is_synchronized_device(self) -> bool:
        """CUDA runs behind the host."""
        return False

    def use_host_timers(self) -> bool:
        """Host timers need no events."""
        return True

    def resolves_data_dependency(self) -> bool:
        """CUDA needs streams for that."""
        return False

    def handles_memory_backpressure(self) -> bool:
        """CUDA does not."""
        return False

    def is_fp16_supported(self) -> bool:
        """By compute capability."""
        return self._traits.has_fp16

    def is_bf16_supported(self) -> bool:
        """By compute capability."""
        return self._traits.has_bf16

    def supported_dtypes(self) -> list[torch.dtype]:
        """As CUDA's accelerator lists them."""
        halves = [torch.half] * self.is_fp16_supported() + [torch.bfloat16] * self.is_bf16_supported()
        return [torch.float, *halves]

    def is_available(self) -> bool:
        """It is always there."""
        return True

    # -- devices -------------------------------------------------------------------------------------------------
    def device_name(self, device_index: int | None = None) -> str:
        """The type, or type and index."""
        return DEVICE_TYPE if device_index is None else f"{DEVICE_TYPE}:{device_index}"

    def device(self, _device_index: int | None = None) -> use_stream:
        """A context that changes nothing."""
        return use_stream(None)

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def current_device(self) -> int:
        """There is one."""
        return 0

    def current_device_name(self) -> str:
        """There is one."""
        return f"{DEVICE_TYPE}:0"

    def device_count(self) -> int:
        """GPUs of the node: ZeRO++ forms its groups by it."""
        return self._num_devices

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the virtual GPU."""
        return tensor.device.type == DEVICE_TYPE

    # -- streams -------------------------------------------------------------------------------------------------
    def stream(self, stream: AnyStream | None) -> use_stream:
        """Allocations inside come from this stream's pools."""
        return use_stream(stream)

    def current_stream(self, _device_index: int | None = None) -> AnyStream:
        """Always the same object for the same stream."""
        return Stream.current

    def default_stream(self, _device_index: int | None = None) -> AnyStream:
        """Stream 0."""
        return Stream.default

    # -- memory --------------------------------------------------------------------------------------------------
    def empty_cache(self) -> None:
        """DeepSpeed calls it while it sets up; it changes what stays reserved."""
        self._tracer.tape.empty_cache()

    def memory_allocated(self, _device_index: int | None = None) -> int:
        """Bytes in use."""
        return self._tracer.allocated_bytes

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
    memory_cached = max_memory_cached = memory_allocated

    def memory_stats(self, _device_index: int | None = None) -> dict[str, int]:
        """No retries to report."""
        return {}

    def total_memory(self, _device_index: int | None = None) -> int:
        """The capacity."""
        return self._total_bytes

    def available_memory(self, _device_index: int | None = None) -> int:
        """The capacity less what is in use."""
        return self._total_bytes - self._tracer.allocated_bytes

    # -- pinned host memory: DeepSpeed's public methods end in these three; the CPU's accelerator bypasses them ------
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._tracer.is_pinned(tensor):
            return tensor
        with self._tracer.pinning():
            return torch.empty_like(tensor)

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        with self._tracer.pinning():
            return tensor.new_empty(shape)

    def empty_locked(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """What DeepSpeed's asynchronous I/O page-locks by itself."""
        with self._tracer.locking():
            return torch.empty(num_elements, dtype=dtype, device="cpu")

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._tracer.is_pinned(tensor)

    # -- compiled operations -------------------------------------------------------------------------------------
    def create_op_builder(self, class_name: str) -> Any:
        """An instance that loads a stand-in for the compiled operations."""
        builder = builder_for(class_name)
        return builder() if builder is not None else None

    def get_op_builder(self, class_name: str) -> Any:
        """The class of the above."""
        return builder_for(class_name)


def _tensor_constructor(dtype: torch.dtype) -> property:
    """A legacy constructor such as `torch.cuda.FloatTensor`."""

    def constructor(_self: VirtualAccelerator) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=DEVICE_TYPE)

    return property(constructor)


for _name, _dtype in {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.double,
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "IntTensor": torch.int,
    "LongTensor": torch.long,
}.items():
    setattr(VirtualAccelerator, _name, _tensor_constructor(_dtype))
