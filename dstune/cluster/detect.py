"""What is in this machine: GPUs by NVML, host memory by psutil and the cgroup's limit. No CUDA context is made."""

import os
from pathlib import Path

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
        import pynvml  # noqa: PLC0415 - loads the driver's library

        pynvml.nvmlInit()
        handles = _visible(pynvml)
    except Exception as error:
        raise _none(str(error)) from error
    if not handles:
        raise _none("no GPU is visible")
    name = pynvml.nvmlDeviceGetName(handles[0])
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handles[0])
    total = int(pynvml.nvmlDeviceGetMemoryInfo(handles[0]).total)
    return _gpu(str(name), total, (major, minor)), len(handles)


def _visible(pynvml: object) -> list[object]:
    """Devices that CUDA would see: `CUDA_VISIBLE_DEVICES` counts."""
    nvml: object = pynvml
    count = nvml.nvmlDeviceGetCount()  # type: ignore[attr-defined]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = range(count) if named is None else [int(part) for part in named.split(",") if part.strip().isdigit()]
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in indices if index < count]  # type: ignore[attr-defined]


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
