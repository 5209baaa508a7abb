"""What runs on the GPUs: one rank of one trial. A program of its own: `python -m dstune.search.job FOLDER`.

Reads `order.json`, builds the model from its configuration, trains on random data with the real DeepSpeed and the real
collectives, and leaves `rank-R.json`. Whatever it prints goes to `rank-R.log`. A rank that fails ends at once, so that
its launcher can stop the others, which wait for it in a collective.
"""

import json
import os
import resource
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from dstune.atomicfile import write_whole
from dstune.lineage import die_with_parent
from dstune.search.diagnose import is_bereft
from dstune.search.trial import Accelerator, JobOrder, Measurement
from dstune.units import KIB

INITIAL_STD = 0.02
"""Standard deviation of initial weights, as in most language models: zeros would draw less power than training."""
NUM_DRAWN = 1 << 20
"""Random numbers that are drawn; larger weights repeat them."""


def main() -> int:
    """Run one rank."""
    folder = Path(sys.argv[1])
    die_with_parent()
    rank = _read_rank()
    with (folder / f"rank-{rank}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    report = folder / f"rank-{rank}.json"
    try:
        order = JobOrder.model_validate_json((folder / "order.json").read_text())
        measured = _Job(order).run()
        write_whole(report, json.dumps({"measurement": measured.model_dump()}))
    except BaseException as error:  # noqa: BLE001 - the border of the process
        traceback.print_exc()
        write_whole(report, json.dumps({"refused": _is_refused(error)}))
        sys.stderr.flush()
        os._exit(1)  # no destructor may wait for other ranks
    os._exit(0)


def _read_rank() -> int:
    """This rank, from torchrun's and DeepSpeed's variables or from Slurm's, which are made to look like those."""
    slurm = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
    for name, other in slurm.items():
        if name not in os.environ and other in os.environ:
            os.environ[name] = os.environ[other]
    return int(os.environ["RANK"])


def _is_refused(error: BaseException) -> bool:
    from dstune.errors import RefusedConfigError  # noqa: PLC0415
    from dstune.estimator.failure import failure_from  # noqa: PLC0415

    if isinstance(error, MemoryError) or "out of memory" in str(error) or is_bereft(str(error)):
        return False
    return failure_from(error).code == RefusedConfigError.code


class _Job:
    """One rank's training."""

    def __init__(self, order: JobOrder) -> None:
        self._order = order
        self._is_cuda = order.accelerator is Accelerator.CUDA
        os.environ.setdefault("DS_ACCELERATOR", order.accelerator.value)
        import torch  # noqa: PLC0415 - after the choice of accelerator

        self._torch = torch
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._device = torch.device("cuda", local_rank) if self._is_cuda else torch.device("cpu")

    def run(self) -> Measurement:
        """Train, and say how fast."""
        self._claim_device()
        self._join_group()
        engine, batch = self._build()
        for _ in range(self._order.warmup_steps):
            self._step(engine, batch)
        steps: list[float] = []
        while not self._is_enough(steps):
            steps.append(self._step(engine, batch))
        micro_step_s, optimizer_step_s = self._step_apart(engine, batch)
        return Measurement(
            step_s=statistics.median(steps),
            spread=(max(steps) - min(steps)) / statistics.median(steps),
            num_steps=len(steps),
            micro_step_s=micro_step_s,
            optimizer_step_s=optimizer_step_s,
            host_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
            **self._gpu_memory(),
        )

    def _claim_device(self) -> None:
        if not self._is_cuda:
            return
        cuda = self._torch.cuda
        cuda.set_device(self._device)
        if self._order.memory_cap_bytes is not None:
            total = cuda.get_device_properties(self._device).total_memory
            cuda.set_per_process_memory_fraction(min(1.0, self._order.memory_cap_bytes / total))

    def _join_group(self) -> None:
        """The real ranks, or rank 0 of a world that is emulated."""
        import deepspeed  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        plan = self._order.plan
        if self._order.num_processes < plan.world_size:
            from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

            os.environ.update(WORLD_SIZE=str(plan.world_size), LOCAL_SIZE=str(plan.ranks_per_node))
            dist.init_process_group("fake", rank=0, world_size=plan.world_size, store=FakeStore())
        else:
            if not self._is_cuda:  # an op that would be compiled first, and bring nothing but speed
                deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            deepspeed.init_distributed("nccl" if self._is_cuda else "gloo", verbose=False)

    def _build(self) -> tuple[Any, Any]:
        import contextlib  # noqa: PLC0415

        import deepspeed  # noqa: PLC0415

        from dstune.dsconfig import ds_config_for  # noqa: PLC0415
        from dstune.model.build import build  # noqa: PLC0415
        from dstune.model.engine import make_engine  # noqa: PLC0415

        plan = self._order.plan
        config = ds_config_for(plan) if self._is_cuda else _for_cpu(ds_config_for(plan))
        config.setdefault("steps_per_print", sys.maxsize)
        around = deepspeed.zero.Init(config_dict_or_path=config) if plan.zero_init else contextlib.nullcontext()
        built = build(self._order.model, plan, around)
        self._fill(built.module)
        engine = make_engine(built, plan, config)
        batch = built.make_batch(plan.micro_batch, plan.seq_len, self._device)
        return engine, _randomized(batch, getattr(getattr(built.module, "config", None), "vocab_size", None))

    def _fill(self, module: Any) -> None:
        """Initial weights: matrices are drawn, vectors are ones. The model's own way takes minutes.

        One block is drawn and copied all over: the clock cares for random bits, not for which.
        """
        block = self._torch.empty(NUM_DRAWN).normal_(0, INITIAL_STD)
        with self._torch.no_grad():
            for param in module.parameters():
                held = getattr(param, "ds_tensor", param)
                if held is param and param.dim() < 2:
                    param.fill_(1)
                else:
                    for piece in held.view(-1).split(NUM_DRAWN):
                        piece.copy_(block[: piece.numel()])

    def _step(self, engine: Any, batch: Any) -> float:
        """One whole step; its seconds."""
        from dstune.model.engine import train_loss  # noqa: PLC0415

        self._wait()
        start = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(train_loss(engine, batch))
            engine.step()
        self._wait()
        return time.perf_counter() - start

    def _step_apart(self, engine: Any, batch: Any) -> tuple[float, float]:
        """Seconds of a micro-step (the median) and of the optimizer, the device being waited for in between."""
        from dstune.model.engine import train_loss  # noqa: PLC0415

        micros: list[float] = []
        step_s = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            self._wait()
            start = time.perf_counter()
            engine.backward(train_loss(engine, batch))
            self._wait()
            middle = time.perf_counter()
            engine.step()
            self._wait()
            micros.append(middle - start)
            step_s = time.perf_counter() - middle
        return statistics.median(micros), step_s

    def _is_enough(self, steps: list[float]) -> bool:
        """Whether to stop timing; all ranks must agree, so the slowest one's clock decides."""
        order = self._order
        if len(steps) < order.min_steps:
            return False
        seconds = self._largest(sum(steps))
        return seconds >= order.min_timed_s or len(steps) >= order.max_steps

    def _largest(self, number: float) -> float:
        """The largest of a number over the real ranks."""
        if self._order.num_processes < 2:
            return number
        held = self._torch.tensor([number], dtype=self._torch.float64, device=self._device)
        self._torch.distributed.all_reduce(held, op=self._torch.distributed.ReduceOp.MAX)
        return float(held.item())

    def _wait(self) -> None:
        if self._is_cuda:
            self._torch.cuda.synchronize(self._device)

    def _gpu_memory(self) -> dict[str, int]:
        if not self._is_cuda:
            return {}
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info(self._device)
        return {
            "peak_allocated_bytes": int(self._largest(cuda.max_memory_allocated(self._device))),
            "peak_reserved_bytes": int(self._largest(cuda.max_memory_reserved(self._device))),
            "device_used_bytes": total - free,
        }


def _for_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """The same config without ops that would have to be compiled: torch's optimizer stands in for DeepSpeed's."""
    optimizer = config.get("optimizer")
    if optimizer is not None and optimizer["type"].lower() in {"adam", "adamw"}:
        config = {**config, "optimizer": {**optimizer, "params": {**optimizer.get("params", {}), "torch_adam": True}}}
    return {**config, "zero_force_ds_cpu_optimizer": False}


def _randomized(batch: Any, vocabulary: int | None) -> Any:
    """The batch with random content: token ids below the vocabulary's size, normal numbers elsewhere."""
    if not isinstance(batch, dict):
        return batch
    for name, item in batch.items():
        if name in {"input_ids", "labels"} and vocabulary is not None and item.dim() == 2:
            item.random_(0, vocabulary)
        elif item.is_floating_point():
            item.normal_()
    return batch


if __name__ == "__main__":
    sys.exit(main())
