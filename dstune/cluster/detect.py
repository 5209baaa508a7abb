"""What is in this machine: GPUs by NVML, host memory by psutil and the cgroup's limit. No CUDA context is made."""

import os
from pathlib import Path
from typing import Any

import psutil

from dstune.cluster import Gpu
from dstune.cluster.catalogue import find_gpu
from dstune.errors import MachineError, UsageError

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Version 2 and version 1."""
MULTIPROCESSOR_GUESS = 108


def detect_gpu() -> tuple[Gpu, int]:
    """The first visible GPU and how many there are.

    Raises:
        MachineError: There is none.
    """
    try:
        pynvml, handles = visible_handles()
    except Exception as error:
        raise _none(str(error)) from error
    if not handles:
        raise _none("no GPU is visible")
    name = pynvml.nvmlDeviceGetName(handles[0])
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handles[0])
    return _gpu(str(name), _usable_bytes(pynvml, handles[0]), (major, minor)), len(handles)


def visible_handles() -> tuple[Any, list[object]]:
    """NVML, and its handles of the devices that CUDA would see. Raises whatever NVML raises where there is none."""
    import pynvml  # noqa: PLC0415 - loads the driver's library

    pynvml.nvmlInit()
    return pynvml, _visible(pynvml)


def _usable_bytes(pynvml: Any, handle: object) -> int:
    """What a process can see: the total less what the driver keeps, which only NVML's second structure tells apart."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return int(memory.total - memory.reserved)


def _visible(pynvml: Any) -> list[object]:
    """Devices that CUDA would see: `CUDA_VISIBLE_DEVICES` counts."""
    count = pynvml.nvmlDeviceGetCount()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = range(count) if named is None else [int(part) for part in named.split(",") if part.strip().isdigit()]
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices if index < count]


def _gpu(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    try:
        multiprocessors = find_gpu(name).num_multiprocessors
    except UsageError:
        multiprocessors = MULTIPROCESSOR_GUESS
    return Gpu(
        name=name,
        capacity_bytes=total_bytes,
        compute_capability=capability,
        num_multiprocessors=multiprocessors,
        source="this machine's driver",
    )


def detect_host_bytes() -> int:
    """Memory of this host, or the cgroup's limit if that is lower."""
    total = int(psutil.virtual_memory().total)
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _none(reason: str) -> MachineError:
    return MachineError(
        "there is no GPU here to estimate for",
        hint="name one: --gpu a100-80gb (`dstune gpus` lists them) or --gpu 24GiB",
        because=(reason[:200],),
    )
