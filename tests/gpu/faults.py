"""Fail on a real GPU in twenty ways, and write down what each trial said and what was left of it.

python -m tests.gpu.faults FOLDER OUT.jsonl [NUMBER]

With a number, so many are left out at the start: a run that was cut short is taken up there.
"""

import importlib.metadata
import json
import socket
import sys
import time
from pathlib import Path
from typing import IO

from dstune.search import launch
from dstune.search.gpumemory import GpuMemory
from dstune.search.trial import Accelerator
from tests.processes.study import BAD_CONFIG, Fault, left_behind, try_once

ONE_RANK = 0
FAULTS = (
    *(Fault(kind, ONE_RANK) for kind in ("", "vram", "pinned", "nccl", "host", "disk", "exit", "children")),
    *(Fault(kind, ONE_RANK) for kind in ("kill", "segfault", "cuda")),
    *(Fault(kind, ONE_RANK, deadline_s=25) for kind in ("stop", "hang")),
    Fault("vram", ONE_RANK, deadline_s=3),
    Fault("vram", ONE_RANK, "torchrun"),
    Fault("cublas", ONE_RANK),
    Fault("kill", ONE_RANK, "torchrun"),
    Fault("vram", ONE_RANK, "deepspeed"),
    Fault("hang", ONE_RANK, "torchrun", deadline_s=25),
    Fault(ds_config=BAD_CONFIG),
)


def main() -> int:
    folder, out = map(Path, sys.argv[1:3])
    start = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    memory = GpuMemory()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    with out.open("w") as file:
        print(json.dumps({"versions": versions, "recorded": time.strftime("%Y-%m-%d")}), file=file, flush=True)
        for number, fault in enumerate(FAULTS[start:]):
            _record(fault, folder / str(number), memory, file)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            launch.free_port = lambda: port
            _record(Fault("port", ONE_RANK), folder / "port", memory, file)
    return 0


def _record(fault: Fault, folder: Path, memory: GpuMemory, file: IO[str]) -> None:
    trial = try_once(fault, folder, Accelerator.CUDA, 1)
    row = {
        "fault": fault.kind or ("config" if fault.ds_config else "none"),
        "launcher": fault.launcher,
        "deadline_s": fault.deadline_s,
        "outcome": trial.ending.outcome.value,
        "detail": trial.ending.detail,
        "rank": trial.ending.rank,
        "last_line": next(iter(trial.ending.log_lines[-1:]), ""),
        "wall_s": trial.wall_s,
        "held_gpu_bytes": memory.used_bytes() - memory.baseline_bytes,
        "num_processes_left": len(left_behind(folder)),
    }
    print(json.dumps(row), file=file, flush=True)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
