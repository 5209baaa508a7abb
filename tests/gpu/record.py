"""Record real training runs on this machine's GPU: `python -m tests.gpu.record SPECS.jsonl OUT.jsonl [--jobs N]`.

A spec is a row of the recorded format without its measurements; each runs in a process of its own, and what it
measured is added. With `"events": true` the allocator's event list is written beside OUT, each allocation with the
operation that made it; with `"events": "plain"` without operations. While operations are logged, autograd sums
gradients out of place, as under any dispatch mode, so such a list has additions that a plain run has not. Weights are
zeros and norms ones. Needs torch, deepspeed and transformers; not dstune.
"""

import argparse
import concurrent.futures
import contextlib
import gc
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 1 << 30
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
"""Values of the option `attn` that force one of torch's kernels."""


class OperationLog(TorchDispatchMode):
    """Remembers how many allocations had been made when each operation ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = num_allocations()
        out = func(*args, **(kwargs or {}))
        after = num_allocations()
        if before and (not self.ends or self.ends[-1][0] < before):
            self.ends.append((before, ""))
        if after > before:
            self.ends.append((after, f"{func._schema.name} {_shapes(args)}"))
        return out


def _shapes(args: Any) -> str:
    """Types and shapes of the arguments, short."""
    parts = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            parts.append(f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}")
        elif isinstance(arg, (int, float, bool)) or arg is None:
            parts.append(str(arg))
        elif isinstance(arg, (tuple, list)) and arg and isinstance(arg[0], int):
            parts.append(str(list(arg)))
        elif isinstance(arg, (tuple, list)):
            parts.append(f"[{len(arg)}]")
    return ", ".join(parts)


def num_allocations() -> int:
    """Allocations since the process began."""
    return int(torch._C._cuda_memoryStats(0)["allocation"]["all"]["allocated"]) if torch.cuda.is_initialized() else 0


class Phases:
    """Memory by phase, as the recorded format has it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def mark(self, name: str) -> None:
        """End a phase."""
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        row: dict[str, Any] = {"phase": name}
        for short, key in (("", "allocated_bytes"), ("reserved", "reserved_bytes"), ("requested", "requested_bytes")):
            now, peak = stats.get(f"{key}.all.current", 0), stats.get(f"{key}.all.peak", 0)
            row[short or "alloc"], row[f"peak_{short or 'alloc'}"] = now, peak
        self.rows.append(row)
        torch.cuda.reset_peak_memory_stats()


def run_spec(spec: dict[str, Any], events_path: Path | None) -> dict[str, Any]:
    """Run one spec in this process and return the whole row."""
    import deepspeed
    import torch.distributed as dist

    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(spec["world_size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(29600 + os.getpid() % 2000),
    )
    if spec.get("memory_cap_gib"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(spec["memory_cap_gib"] * GIB / total)
    if spec.get("process_group", "fake") == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(backend="fake", rank=0, world_size=spec["world_size"], store=FakeStore())
    else:
        deepspeed.init_distributed("nccl")
    log = OperationLog()
    if events_path is not None:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=4_000_000)
        if spec.get("events") != "plain":
            log.__enter__()
    phases = Phases()
    row = dict(spec)
    try:
        row.update(_train(spec, phases))
        row["status"] = "ok"
    except torch.OutOfMemoryError as error:
        found = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        row.update(status="oom", failed_allocation=found[1] if found else None)
    if events_path is not None:
        if spec.get("events") != "plain":
            log.__exit__(None, None, None)
        _save_events(events_path, log)
    row["phases" if row["status"] == "ok" else "phases_before_failure"] = phases.rows
    if row["status"] == "ok":
        for key in ("alloc", "reserved", "requested"):
            name = "allocated" if key == "alloc" else key
            row[f"peak_{name}"] = max(phase[f"peak_{key}"] for phase in phases.rows)
    row["alloc_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    row["host_rss_max"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    row["pinned_host"] = {key: value for key, value in pinned.items() if "bytes" in key or key.startswith("seg")}
    return row


def _build(spec: dict[str, Any]) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    config = dict(spec["model"])
    class_name, kind = config.pop("model_class"), config.pop("model_type")
    options = spec["model_options"]
    settings = transformers.AutoConfig.for_model(kind, **config)
    model_class = getattr(transformers, class_name)
    asked = options.get("attn", "sdpa" if model_class._supports_sdpa else "eager")
    settings._attn_implementation = "sdpa" if asked in KERNELS else asked
    with no_init_weights(), _construction(spec):
        model = model_class(settings)
    model.tie_weights()
    with torch.no_grad():
        for name, param in model.named_parameters():
            held = param.ds_tensor if hasattr(param, "ds_tensor") else param
            held.fill_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
    if options.get("load_dtype"):
        model.to(getattr(torch, options["load_dtype"]))
    if options.get("lora"):
        import peft

        lora = options["lora"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=lora["r"], target_modules=lora["targets"], lora_dropout=0.0)
        )
    if options.get("ckpt") == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(verbose=False)
        deepspeed.checkpointing.configure(None, deepspeed_config=spec["ds_config"])
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=deepspeed.checkpointing.checkpoint)
    elif options.get("ckpt"):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": options["ckpt"] == "reentrant"}
        )
    model.config.use_cache = False
    return model.train()


def _construction(spec: dict[str, Any]) -> Any:
    """`deepspeed.zero.Init`, or nothing."""
    import deepspeed

    if spec["model_options"].get("zero_init"):
        return deepspeed.zero.Init(config_dict_or_path=spec["ds_config"])
    return contextlib.nullcontext()


def _train(spec: dict[str, Any], phases: Phases) -> dict[str, Any]:
    import deepspeed
    import transformers

    model = _build(spec)
    said: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "recorded": time.strftime("%Y-%m-%d"),
        "host_rss_after_build": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "params": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    phases.mark("built")
    params = [param for param in model.parameters() if param.requires_grad]
    client = {
        "adamw": lambda: torch.optim.AdamW(params, lr=1e-4),
        "adafactor": lambda: torch.optim.Adafactor(params, lr=1e-4),
        "sgd": lambda: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
        "adam8bit": lambda: _bitsandbytes().Adam8bit(params, lr=1e-4),
        "adamw8bit": lambda: _bitsandbytes().AdamW8bit(params, lr=1e-4),
    }.get(spec["model_options"].get("client_opt"))
    extra = {"optimizer": client()} if client else {}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=spec["ds_config"], **extra)
    gc.collect()
    phases.mark("initialized")
    said["optimizer"] = (
        f"{type(engine.optimizer).__name__}/{type(getattr(engine.optimizer, 'optimizer', None)).__name__}"
    )
    batch = _batch(spec, engine.module)
    kernel = KERNELS.get(spec["model_options"].get("attn"))
    with torch.nn.attention.sdpa_kernel(kernel) if kernel else contextlib.nullcontext():
        for step in range(spec["steps"]):
            for micro in range(spec["ds_config"]["gradient_accumulation_steps"]):
                loss = engine(**batch).loss
                phases.mark(f"fwd{step}.{micro}")
                engine.backward(loss)
                del loss
                phases.mark(f"bwd{step}.{micro}")
                engine.step()
                phases.mark(f"step{step}.{micro}")
    return said


def _bitsandbytes() -> Any:
    import bitsandbytes

    return bitsandbytes.optim


def _batch(spec: dict[str, Any], module: Any) -> dict[str, Any]:
    count, options = spec["micro_batch"], spec["model_options"]
    if options.get("input") == "vit":
        size = getattr(module.config, "image_size", None) or 224
        pixels = torch.randn(count, 3, size, size, device="cuda", dtype=next(module.parameters()).dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(count, dtype=torch.long, device="cuda")}
    if options.get("input") == "audio":
        config = module.config
        shape = (count, config.num_mel_bins, 2 * config.max_source_positions)
        features = torch.zeros(shape, device="cuda", dtype=next(module.parameters()).dtype)
        length = min(spec["seq_len"], config.max_target_positions)
        return {"input_features": features, "labels": torch.zeros((count, length), dtype=torch.long, device="cuda")}
    ids = torch.randint(0, module.config.vocab_size, (count, spec["seq_len"]), device="cuda")
    one_label = type(module).__name__.endswith("ForSequenceClassification")
    batch = {"input_ids": ids, "labels": ids.new_zeros(count) if one_label else ids}
    if options.get("mask"):
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def _save_events(path: Path, log: OperationLog) -> None:
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    events: list[list[Any]] = []
    ends = iter([*log.ends, (1 << 60, "")])
    end, label = next(ends)
    made = 0
    for entry in trace:
        event = [entry["action"], entry["addr"], entry["size"], entry["stream"]]
        if entry["action"] == "alloc":
            while made >= end:
                end, label = next(ends)
            made += 1
            event.append(label)
        events.append(event)
    path.write_bytes(gzip.compress(json.dumps(_numbered(events)).encode(), mtime=0))


def _numbered(events: list[list[Any]]) -> list[list[Any]]:
    """Streams as small numbers, in order of appearance."""
    streams: dict[int, int] = {}
    for event in events:
        event[3] = streams.setdefault(event[3], len(streams))
    return events


def _run_child(spec: dict[str, Any], out: Path, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.gpu.record", "--one", json.dumps(spec), str(out)]
    try:
        environment = {**os.environ, **({"PYTORCH_ALLOC_CONF": conf} if (conf := spec.get("allocator_conf")) else {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {**spec, "status": "timeout"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"row"')]
    if lines:
        row: dict[str, Any] = json.loads(lines[-1])["row"]
        return row
    return {**spec, "status": "failed", "stderr": done.stderr[-1500:]}


def main() -> int:
    """Record all specs, several at a time: each process has an allocator of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record", description=__doc__)
    parser.add_argument("specs")
    parser.add_argument("out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    options = parser.parse_args()
    if options.one:
        spec = json.loads(options.specs)
        wanted = spec.get("events", False)
        events = options.out.with_name(f"{spec['name']}.json.gz") if wanted else None
        print(json.dumps({"row": run_spec(spec, events)}), flush=True)
        os._exit(0)
    specs = [json.loads(line) for line in Path(options.specs).read_text().splitlines() if line.strip()]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as file:
        jobs = [pool.submit(_run_child, spec, options.out, options.timeout_s) for spec in specs]
        for job in concurrent.futures.as_completed(jobs):
            row = job.result()
            print(row["name"], row["status"], row.get("peak_allocated"), row.get("stderr", "")[-300:], flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
