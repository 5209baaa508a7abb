"""Record a whole grid on a real GPU, as the journal of a search that tries everything.

python -m tests.gpu.grid MODEL FOLDER --memory-cap 24GiB --global-batch 16 --seq-len 1024

Each trial is the job that a search runs, in a process forked where torch and transformers are already imported: a grid
is long, and importing them takes longer than a trial's steps.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dstune.cli.request import Words, read_cluster, read_plans
from dstune.estimator.overhead import overhead
from dstune.model.source import resolve
from dstune.report.study import trial_line
from dstune.search import job
from dstune.search.fitting import fit_tracks
from dstune.search.journal import Journal
from dstune.search.launch import POLL_S, Launched, Launcher, Layout, free_port
from dstune.search.session import Limits, Session, Stage
from dstune.search.space import Track, track_of
from dstune.search.strategy import Choice, Climb
from dstune.search.trial import Accelerator, JobOrder
from dstune.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Forked(Launcher):
    """One rank, forked from this process."""

    def run(self, layout: Layout, folder: Path, timeout_s: float) -> Launched:
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **layout.environment}
            sys.argv = [sys.argv[0], str(folder)]
            job.main()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return Launched((os.waitstatus_to_exitcode(status),), timed_out=False)
            time.sleep(POLL_S)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return Launched((-signal.SIGKILL,), timed_out=True)


def preload() -> None:
    """What takes longest to import, and touches no GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch
    import transformers
    from transformers import initialization, modeling_utils  # noqa: F401
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    with contextlib.suppress(ImportError):
        import torch._dynamo
    os.environ["DS_ACCELERATOR"] = "cuda"
    if _try_in_child():
        import deepspeed  # noqa: F401
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)


def _try_in_child() -> bool:
    """Whether a process that has imported deepspeed can still be forked: its import may touch the GPU."""
    child = os.fork()
    if child == 0:
        import deepspeed  # noqa: F401
        import torch

        grandchild = os.fork()
        if grandchild == 0:
            torch.zeros(1, device="cuda")
            os._exit(0)
        os._exit(int(os.waitpid(grandchild, 0)[1] != 0))
    is_fine = os.waitpid(child, 0)[1] == 0
    print(f"deepspeed can be imported before the fork: {is_fine}", flush=True)
    return is_fine


class Everything(Climb):
    """All settings that are not known to be too large, the largest micro-batches last."""

    def ask(self) -> Choice | None:
        for number, track in enumerate(self.tracks):
            for position in track.candidates():
                if (number, position) not in self._seen and self._is_open((number, position)):
                    return (number, position)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory-cap", required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--zero", default="1,2,3")
    parser.add_argument("--offload", default="none,optimizer")
    parser.add_argument("--checkpointing", default="off")
    parser.add_argument("--micro-batch", default=None, help="a list; all that divide the global batch if left out")
    parser.add_argument("--budget-s", type=float, default=500)
    options = parser.parse_args()
    spec = resolve(options.model, trust_remote_code=False)
    preload()
    real = read_cluster(None, 1, 1, None)
    cap = parse_bytes(options.memory_cap, "memory cap")
    cluster = real.model_copy(update={"gpu": real.gpu.model_copy(update={"capacity_bytes": cap})})
    words = Words(
        options.zero, options.offload, "bf16", options.checkpointing, None, None, options.seq_len, "AdamW", "sdpa",
        None, None, None, None, True, None,  # noqa: FBT003
    )  # fmt: skip
    plans, _ = read_plans(words, spec, cluster)
    sizes = [int(size) for size in options.micro_batch.split(",")] if options.micro_batch else None
    tracks: list[Track] = [track_of(plan, options.global_batch, sizes) for plan in plans]
    tracks = fit_tracks(tracks, spec, cluster)
    template = JobOrder(
        plan=plans[0],
        model=spec,
        accelerator=Accelerator.CUDA,
        num_processes=1,
        memory_cap_bytes=cap - overhead(1).size_bytes,
    )
    with Journal(options.folder, {"grid": options.model, "memory_cap_bytes": cap}) as journal:
        session = Session(
            tracks,
            Stage(Forked("forked", None, lambda *_: []), Layout(), template, options.folder.absolute()),
            journal,
            Limits(options.budget_s, 1000, 120),
            Everything(tracks, cap),
            lambda trial, best: print(trial_line(trial, best), flush=True),
        )
        session.run()
        print(session.stopped_by)
    return 0


if __name__ == "__main__":
    sys.exit(main())
