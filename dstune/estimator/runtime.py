"""One plan, for real: build the model, `deepspeed.initialize`, forward, backward, step, with phases marked."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dstune.dsconfig import ds_config_for
from dstune.errors import ModelError, UnsupportedOperationError
from dstune.estimator import patches
from dstune.estimator.accelerator import VirtualAccelerator
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.device import DEVICE_TYPE
from dstune.estimator.dispatchcache import DispatchCache
from dstune.estimator.expandable import make_allocator
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.job import Answer, Job
from dstune.estimator.nvme import AioHandle
from dstune.estimator.replay import Replay
from dstune.estimator.shortcuts import apply_shortcuts
from dstune.estimator.tape import Tape
from dstune.estimator.tracer import Tracer
from dstune.estimator.values import Values
from dstune.model.build import BuiltModel, build
from dstune.model.engine import make_engine, train_loss
from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing

ROUTED = "mixture of experts: routing is taken as `{}` (--routing); a trained router lies between balanced and worst"
"""Said of every estimate in which a router was met."""


def run(
    job: Job, accelerator: VirtualAccelerator, report_fault: Callable[[BaseException], object]
) -> tuple[Answer, Tape]:
    """Run a job in this process, which afterwards is good for nothing else.

    Args:
        job: What to run.
        accelerator: DeepSpeed's.
        report_fault: Called with a fault inside a backward, where an exception would end the process.
    """
    start = time.perf_counter()
    gc.disable()  # tensors in cycles would be freed when Python's counters say, which no two runs agree on
    traits = GpuTraits(*job.compute_capability, job.num_multiprocessors, job.plan.attention.value)
    values = Values(job.routing)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer(traits, values, report_fault, DispatchCache(mode) if job.has_shortcuts else None)
    accelerator.bind(tracer, traits, job.capacity_bytes, job.plan.ranks_per_node)
    patches.apply_all(traits)
    if job.has_shortcuts:
        apply_shortcuts(traits)
    _join_group(job.plan)
    with torch.compiler.set_stance("force_eager"), mode, tracer:
        built = build(job.model, job.plan, _construction(job.plan))
        _refuse_compiled(built.module, ds_config_for(job.plan))
        if job.plan.activation_checkpointing is Checkpointing.DEEPSPEED:
            _checkpoint_by_deepspeed(built.module, ds_config_for(job.plan))
        tracer.modules.watch(built.module)
        gc.collect()
        tracer.tape.mark("built")
        engine = make_engine(built, job.plan, ds_config_for(job.plan))
        gc.collect()
        tracer.tape.mark("initialized")
        steps = Steps(engine, built, job.plan, tracer)
        if job.history is None:
            steps.run(job.plan.micro_batch, job.num_steps)
        else:
            steps.run_history(job)
    parameters = list(built.module.parameters())
    answer = Answer(
        num_parameters=sum(_numel(p) for p in parameters),
        num_trainable=sum(_numel(p) for p in parameters if p.requires_grad),
        optimizer=_optimizer_name(engine),
        num_ops=tracer.num_ops,
        notes=(ROUTED.format(job.routing.value),) if values.routed else (),
        disk_bytes=sum(AioHandle.file_bytes.values()),
        seconds=time.perf_counter() - start,
    )
    return answer, tracer.tape


class Steps:
    """Training steps of one engine."""

    def __init__(self, engine: Any, built: BuiltModel, plan: TrainingPlan, tracer: Tracer) -> None:
        self._engine = engine
        self._built = built
        self._plan = plan
        self._tracer = tracer

    def run(self, micro_batch: int, num_steps: int) -> None:
        """Whole steps with their micro-steps; every forward, backward and step is a phase."""
        batch = self._built.make_batch(micro_batch, self._plan.seq_len, torch.device(DEVICE_TYPE))
        for step in range(num_steps):
            for micro in range(self._engine.gradient_accumulation_steps()):
                for name in self._micro_step(batch):
                    self._tracer.tape.mark(f"{name}{step}.{micro}")

    def run_history(self, job: Job) -> None:
        """One micro-batch after the other in the same engine, until one does not fit."""
        state = Replay(make_allocator(AllocConf.parse(job.plan.alloc_conf), job.capacity_bytes, is_fraction=True))
        for micro_batch in job.history or ():
            gc.collect()
            self._tracer.tape.empty_cache()
            self._tracer.tape.mark(f"before{micro_batch}")
            self.run(micro_batch, job.num_steps)
            self._tracer.tape.mark(f"micro_batch{micro_batch}")
            state.feed(self._tracer.tape)
            if state.shortage is not None:
                return

    def _micro_step(self, batch: Any) -> Iterator[str]:
        tracer, engine = self._tracer, self._engine
        tracer.phase = "forward"
        loss = train_loss(engine, batch)
        yield "fwd"
        tracer.phase = "backward"
        tracer.modules.reset()
        engine.backward(loss)
        del loss
        yield "bwd"
        tracer.phase = "step"
        tracer.modules.reset()
        engine.step()
        yield "step"


def _join_group(plan: TrainingPlan) -> None:
    """Become rank 0 of the world: collectives of the fake group return at once and leave shapes right."""
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(plan.world_size),
        LOCAL_SIZE=str(plan.ranks_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29555",
        CROSS_RANK="0",
        CROSS_SIZE="1",
    )
    dist.init_process_group(backend="fake", rank=0, world_size=plan.world_size, store=FakeStore())


def _construction(plan: TrainingPlan) -> contextlib.AbstractContextManager[Any]:
    """`deepspeed.zero.Init`, which partitions each parameter when it is made, or nothing."""
    if not plan.zero_init:
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=ds_config_for(plan))
    return made


def _refuse_compiled(module: torch.nn.Module, ds_config: dict[str, Any]) -> None:
    """A compiled step allocates what the compiler plans, and none is here to ask."""
    is_deep = (ds_config.get("compile") or {}).get("deepcompile", False)
    if is_deep or any(isinstance(part, torch._dynamo.OptimizedModule) for part in module.modules()):
        msg = "torch.compile is not supported: what a compiled step allocates is the compiler's choice"
        raise UnsupportedOperationError(msg, hint="estimate the model without it; a compiled one rarely needs more")


def _checkpoint_by_deepspeed(module: Any, ds_config: dict[str, Any]) -> None:
    """As DeepSpeed's documentation says: configure it once, and let layers call its `checkpoint`."""
    if not hasattr(module, "_set_gradient_checkpointing"):
        msg = f"`{type(module).__name__}` has no switch for activation checkpointing"
        raise ModelError(
            msg, hint="call deepspeed.checkpointing.checkpoint in its forward, and pass --checkpointing off"
        )
    deepspeed.init_distributed(dist_backend="fake", verbose=False)
    deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
    module._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=deepspeed.checkpointing.checkpoint)


def _numel(param: Any) -> int:
    return int(getattr(param, "ds_numel", param.numel()))


def _optimizer_name(engine: Any) -> str:
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", None)
    names = [type(part).__name__ for part in (outer, inner) if part is not None]
    return "/".join(names)
