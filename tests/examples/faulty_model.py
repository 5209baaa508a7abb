"""A model that fails in training, on one rank, in the way that the variable FAULT names."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from tests.examples.own_model import Regressor, make_batch


def _say(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeError(text)

    return fail


def _leave_children() -> None:
    """Data loaders outlive their parent: one in the rank's own session, one in a session of its own."""
    for apart in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=apart)
    _say("left children")()


def _refuse_to_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def _fill_host() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 35, 1 << 35))
    torch.zeros(1 << 40)


def _fill_disk() -> None:
    Path("/dev/full").write_text("checkpoint")


def _take_gpu_memory() -> list[torch.Tensor]:
    """All that the driver gives, down to the last page."""
    taken, size = [], 1 << 34
    while size >= 1 << 21:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size >>= 1
    return taken


def _starve_cublas() -> None:
    """Another thread has no cuBLAS handle yet: to make one needs GPU memory."""
    taken = _take_gpu_memory()
    factor = taken[0][: 1 << 20].view(torch.bfloat16).view(512, -1)
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.mm, factor, factor.t()).result()
    torch.cuda.synchronize()
    _say("cuBLAS needed nothing")()


def _starve_nccl() -> None:
    taken = _take_gpu_memory()
    torch.distributed.all_reduce(taken[0][:4], group=torch.distributed.new_group([0]))
    torch.cuda.synchronize()
    _say("NCCL needed nothing")()


FAULTS: dict[str, Callable[[], object]] = {
    "": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _refuse_to_end,
    "children": _leave_children,
    "host": _fill_host,
    "disk": _fill_disk,
    "exit": lambda: os._exit(7),
    "vram": lambda: torch.empty(1 << 45, device="cuda").zero_(),
    "pinned": lambda: torch.empty(1 << 45, pin_memory=True).zero_(),
    "cublas": _starve_cublas,
    "nccl": _starve_nccl,
    "cuda": _say("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.65 GiB"),
}


class Faulty(Regressor):
    """Fails in its second forward, when the ranks have already talked to each other."""

    calls = 0

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 and os.environ["RANK"] == os.environ.get("FAULT_RANK", "1"):
            FAULTS[os.environ["FAULT"]]()
        return super().forward(features, targets)


def make() -> tuple[nn.Module, object]:
    """The module and its batch function."""
    return Faulty(64, 2), lambda micro_batch, seq_len, device: {
        name: tensor[..., :64].contiguous() for name, tensor in make_batch(micro_batch, seq_len, device).items()
    }
