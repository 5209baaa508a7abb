"""NVMe offload without a disk: the handle of DeepSpeed's asynchronous I/O, which counts what would be written.

Source: deepspeed 0.19.8 `ops/csrc/aio/py_lib/deepspeed_py_io_handle.cpp` for what each call answers.
"""

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from deepspeed.accelerator import get_accelerator


class AioHandle:
    """DeepSpeed's `aio_handle`: reads and writes end at once.

    Attributes:
        file_bytes: Size of each file that was written, of all handles together.
    """

    file_bytes: ClassVar[dict[str, int]] = {}

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._num_pending = 0

    def async_pread(self, _buffer: torch.Tensor, _path: str, _offset: int = 0) -> int:
        """Queue a read; 0 means accepted."""
        self._num_pending += 1
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        """Queue a write; 0 means accepted."""
        self._num_pending += 1
        return self.sync_pwrite(buffer, path, offset)

    def sync_pread(self, _buffer: torch.Tensor, _path: str, _offset: int = 0) -> int:
        """Read; 0 means done."""
        return 0

    def sync_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        """Write; 0 means done."""
        end = offset + buffer.numel() * buffer.element_size()
        self.file_bytes[str(path)] = max(end, self.file_bytes.get(str(path), 0))
        return 0

    def wait(self) -> int:
        """How many operations ended."""
        ended, self._num_pending = self._num_pending, 0
        return ended

    def new_cpu_locked_tensor(self, num_elements: int, example: torch.Tensor) -> torch.Tensor:
        """A page-locked host tensor, outside torch's own pinned cache."""
        locked: torch.Tensor = get_accelerator().empty_locked(num_elements, example.dtype)
        return locked

    def free_cpu_locked_tensor(self, _tensor: torch.Tensor) -> bool:
        """The tensor goes when its last owner does."""
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is page-locked."""
        return bool(get_accelerator().is_pinned(tensor))


def without_disk(_module: Any) -> SimpleNamespace:
    """What DeepSpeed's swappers use of `os`, making no folder."""
    return SimpleNamespace(path=os.path, makedirs=lambda *_args, **_kwargs: None)


def without_removal(_module: Any) -> SimpleNamespace:
    """What DeepSpeed's swappers use of `shutil`, removing nothing."""
    return SimpleNamespace(rmtree=lambda *_args, **_kwargs: None)
