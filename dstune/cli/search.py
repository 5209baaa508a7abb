"""`dstune search`."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dstune.atomicfile import write_whole
from dstune.cli import options
from dstune.cli.request import Words, read_cluster, read_plans
from dstune.cluster import Cluster
from dstune.dsconfig.emitted import config_text, provenance_text
from dstune.errors import ExitCode, UsageError
from dstune.estimator import ResultCache
from dstune.estimator.overhead import overhead
from dstune.model import ModelSpec
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.report import study, text
from dstune.report.machine import envelope, trial_entry
from dstune.search.fitting import fit_tracks
from dstune.search.journal import Journal
from dstune.search.launch import LAUNCHERS, Layout, default_launcher
from dstune.search.session import Limits, Session, Stage
from dstune.search.space import AXES, Track, read_global_batch, track_of, variants
from dstune.search.strategy import Climb
from dstune.search.trial import Accelerator, JobOrder, Trial
from dstune.units import parse_bytes
from dstune.vocab import DEFAULT_OPTIMIZER, Verdict

SEARCH = "Search"
CPU, VIRTUAL = "cpu", "virtual"
CPU_GPU = "24GiB"
"""What a CPU's ranks are called where a GPU's size is asked for; nothing is estimated with it."""
SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Request:
    """A search, read and checked."""

    spec: ModelSpec
    cluster: Cluster
    tracks: list[Track]
    launcher: str
    memory_cap_bytes: int | None
    num_processes: int
    min_steps: int


def search(
    model: options.ModelWord,
    gpu: options.GpuWord = None,
    gpus: options.Gpus = None,
    nodes: options.Nodes = 1,
    host_memory: options.HostMemory = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            "--global-batch", metavar="N|'N tokens'", help="Sequences (or tokens) a step.", rich_help_panel=SEARCH
        ),
    ] = None,
    zero: options.Zero = "1,2,3",
    offload: options.OffloadWords = "none,optimizer",
    precision: options.PrecisionWords = "bf16",
    checkpointing: options.CheckpointingWord = "off",
    micro_batch: Annotated[
        str | None,
        typer.Option("--micro-batch", metavar="LIST", help="Only these micro-batches.", rich_help_panel=SEARCH),
    ] = None,
    seq_len: options.SeqLen = None,
    optimizer: options.Optimizer = DEFAULT_OPTIMIZER,
    sequence_parallel: options.SequenceParallel = 1,
    attention: options.AttentionWord = "sdpa",
    lora: options.Lora = None,
    zero_init: options.ZeroInit = True,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help=f"{', '.join(LAUNCHERS)}, {CPU} or {VIRTUAL}. Default: what is here.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option("--hostfile", help="DeepSpeed's host file.", rich_help_panel=SEARCH)
    ] = None,
    emulate_world_size: Annotated[
        int | None,
        typer.Option(
            "--emulate-world-size", help="Be rank 0 of so many, on one GPU: true memory.", rich_help_panel=SEARCH
        ),
    ] = None,
    memory_cap: Annotated[
        str | None,
        typer.Option("--memory-cap", metavar="SIZE", help="Pretend GPUs of this size.", rich_help_panel=SEARCH),
    ] = None,
    headroom: Annotated[
        str, typer.Option("--headroom", metavar="PERCENT", help="GPU memory to leave free.", rich_help_panel=SEARCH)
    ] = "0%",
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Stop after this: 90s, 15m, 1h.", rich_help_panel=SEARCH)
    ] = "15m",
    max_trials: Annotated[
        int, typer.Option("--max-trials", help="Stop after so many trials.", rich_help_panel=SEARCH)
    ] = 12,
    trial_timeout: Annotated[
        str, typer.Option("--trial-timeout", metavar="TIME", help="One trial's deadline.", rich_help_panel=SEARCH)
    ] = "5m",
    axes: Annotated[
        str | None,
        typer.Option(
            "--axes", metavar="LIST", help=f"Vary the best in these too: {', '.join(AXES)}.", rich_help_panel=SEARCH
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Steps timed a trial, at least.", rich_help_panel=SEARCH)
    ] = 3,
    output: Annotated[
        str, typer.Option("--output", metavar="DIR", help="The study's folder.", rich_help_panel=options.OUTPUT)
    ] = "dstune-search",
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew.", rich_help_panel=SEARCH)] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be tried, and stop.", rich_help_panel=SEARCH)
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    jobs: options.Jobs = None,
    cache: options.Cache = True,
    json: options.Json = False,
) -> ExitCode:
    """The fastest micro-batch, accumulation, stage and offload that do not run out of memory, by short real trials.

    dstune search llama-3-8b --global-batch 256 --seq-len 4096 --zero 1,2,3

    dstune search ./my-model --launcher cpu --gpus 2 --global-batch 16 --seq-len 32 --zero 1,2 --budget 5m

    dstune search gpt2 --memory-cap 24GiB --global-batch '65536 tokens' --checkpointing both --dry-run
    """
    options.at_least_one(max_trials, "--max-trials")
    options.at_least_one(emulate_world_size, "--emulate-world-size")
    options.at_least_one(steps, "--steps")
    axis_names = [] if axes is None else options.listed(axes, "--axes", str, tuple(AXES))
    limits = Limits(seconds(budget, "--budget"), max_trials, seconds(trial_timeout, "--trial-timeout"))
    words = Words(
        zero, offload, precision, checkpointing, None, None, seq_len, optimizer, attention, lora, None, None, None,
        zero_init, None, sequence_parallel,
    )  # fmt: skip
    layout = Layout(num_nodes=nodes, hostfile=Path(hostfile) if hostfile else None)
    name = options.one_of(launcher or default_launcher(layout), "--launcher", str, (*LAUNCHERS, CPU, VIRTUAL))
    spec = resolve(model, trust_remote_code=trust_remote_code)
    cap_bytes = parse_bytes(memory_cap, "memory cap") if memory_cap else None
    real = read_cluster(CPU_GPU if name == CPU and gpu is None else gpu, gpus, nodes, host_memory)
    cluster = _pretended(real, emulate_world_size, cap_bytes, _share(headroom))
    sizes = None if micro_batch is None else _sizes(micro_batch)
    plans, _ = read_plans(words, spec, cluster)
    batch = None if global_batch is None else read_global_batch(global_batch, plans[0].seq_len)
    tracks = [track_of(plan, batch, sizes) for plan in plans]
    if name not in {CPU, VIRTUAL}:
        LAUNCHERS[name].check()
    if name != CPU:
        tracks = fit_tracks(
            tracks, spec, cluster, num_parallel=jobs, cache=ResultCache() if cache else None, on_load=_say_loading
        )
    tracks += variants(tracks, axis_names)
    torch_cap = None if cap_bytes is None else max(1, cap_bytes - overhead(cluster.world_size).size_bytes)
    num_processes = 1 if emulate_world_size else real.world_size
    request = Request(spec, cluster, tracks, name, torch_cap, num_processes, steps)
    err = text.console(stderr=True)
    for line in study.plan_lines(tracks, limits.max_trials, limits.budget_s):
        err.print(line)
    if dry_run or name == VIRTUAL:
        return _say_predicted(request, as_json=json)
    if not any(track.candidates() for track in tracks):
        return _finish(None, [], "nothing fits", Path(output), as_json=json)
    return _run(request, limits, Path(output), restart=restart, as_json=json, layout=layout, real=real)


def _run(
    request: Request, limits: Limits, folder: Path, *, restart: bool, as_json: bool, layout: Layout, real: Cluster
) -> ExitCode:
    is_cpu = request.launcher == CPU
    template = JobOrder(
        plan=request.tracks[0].plans[0],
        model=request.spec,
        accelerator=Accelerator.CPU if is_cpu else Accelerator.CUDA,
        num_processes=request.num_processes,
        memory_cap_bytes=request.memory_cap_bytes,
        min_steps=request.min_steps,
        max_steps=max(request.min_steps, JobOrder.model_fields["max_steps"].default),
    )
    per_node = 1 if request.num_processes == 1 else real.gpus_per_node
    variables = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if is_cpu else {}
    layout = Layout(real.num_nodes, per_node, layout.hostfile, variables)
    launcher = LAUNCHERS["local" if is_cpu else request.launcher]
    err = text.console(stderr=True)
    with Journal(folder, _header(request, template), restart=restart) as journal:
        session = Session(
            request.tracks,
            Stage(launcher, layout, template, folder.absolute()),
            journal,
            limits,
            Climb(request.tracks, None if is_cpu else request.cluster.gpu.capacity_bytes),
            _say_trial,
        )
        if journal.trials:
            err.print(f"resumed: {len(journal.trials)} trials are in {journal.path}")
        session.run()
        code = _finish(session.best, journal.trials, session.stopped_by or "Ctrl-C", folder, as_json=as_json)
    if session.is_interrupted:
        err.print(f"interrupted; resume with the same command (the journal is {journal.path})")
        return ExitCode.INTERRUPTED
    return code


def _header(request: Request, template: JobOrder) -> dict[str, Any]:
    """What makes a study another study."""
    return {
        "model": request.spec.model_dump(mode="json"),
        "plans": [[plan.digest() for plan in track.plans] for track in request.tracks],
        "gpu": request.cluster.gpu.model_dump(mode="json"),
        "accelerator": template.accelerator.value,
        "num_processes": template.num_processes,
        "memory_cap_bytes": template.memory_cap_bytes,
    }


def _say_trial(trial: Trial, best: Trial | None) -> None:
    err = text.console(stderr=True)
    err.print(study.trial_line(trial, best))
    for line in trial.ending.log_lines if trial.measurement is None else ():
        err.print(f"      {line}")


def _finish(best: Trial | None, trials: list[Trial], stopped_by: str, folder: Path, *, as_json: bool) -> ExitCode:
    """Write the best config and say what was found."""
    code = ExitCode.OK if best else ExitCode.NEGATIVE
    path = folder / "ds_config.json"
    if best is not None:
        write_whole(path, config_text(best.plan))
        write_whole(folder / "ds_config.dstune.json", provenance_text(best.plan, "search", {"trial": best.number}))
    warnings = study.noise_lines(trials)
    if as_json:
        data = {
            "best": None if best is None else trial_entry(best),
            "trials": [trial_entry(trial) for trial in trials],
            "stopped_by": stopped_by,
            "warnings": warnings,
            "config": str(path) if best else None,
        }
        sys.stdout.write(envelope("search", code, data) + "\n")
        return code
    out = text.console()
    for line in study.answer_lines(best, trials, stopped_by):
        out.print(line)
    if best is not None:
        out.print(f"Written: {path}", soft_wrap=True)
    for warning in warnings:
        text.console(stderr=True).print(f"warning: {warning}", soft_wrap=True)
    return code


def _say_predicted(request: Request, *, as_json: bool) -> ExitCode:
    """Nothing is run: the cheapest track's largest micro-batch that surely fits."""
    tracks = [track for track in request.tracks if Verdict.FITS in track.verdicts]
    best = min(tracks, key=lambda track: track.cost, default=None)
    plan = None if best is None else _largest_sure(best)
    code = ExitCode.OK if plan else ExitCode.NEGATIVE
    if as_json:
        data = {
            "predicted": None if plan is None else plan.model_dump(mode="json", exclude_none=True),
            "tracks": [
                {
                    "plans": [plan.model_dump(mode="json", exclude_none=True) for plan in track.plans],
                    "verdicts": list(track.verdicts),
                    "reason": track.reason,
                }
                for track in request.tracks
            ],
        }
        sys.stdout.write(envelope("search", code, data) + "\n")
    elif plan is None:
        text.console().print("Nothing fits")
    else:
        text.console().print(f"Fits with the least communication and recomputation: {text.describe(plan)}")
    return code


def _largest_sure(track: Track) -> TrainingPlan:
    return [plan for plan, verdict in zip(track.plans, track.verdicts, strict=True) if verdict is Verdict.FITS][-1]


def _pretended(real: Cluster, world_size: int | None, cap_bytes: int | None, headroom: float) -> Cluster:
    """The cluster that the plans are for: emulated ranks, capped and not filled to the brim."""
    room = min(real.gpu.capacity_bytes, cap_bytes or real.gpu.capacity_bytes)
    gpu = real.gpu.model_copy(update={"capacity_bytes": int(room * (1 - headroom))})
    changes: dict[str, Any] = {"gpu": gpu}
    if world_size is not None:
        changes |= {"num_nodes": 1, "gpus_per_node": world_size}
    return real.model_copy(update=changes)


def _sizes(words: str) -> list[int]:
    """Read `1,2,4`."""
    found = [options.number_or_max(word.strip(), "--micro-batch") for word in words.split(",")]
    if None in found:
        raise UsageError("--micro-batch max is for estimate", hint="a search looks for the largest by itself")
    return [size for size in found if size is not None]


def _share(word: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", word.strip())
    if match is None or not 0 <= float(match.group(1)) < 100:
        raise UsageError(f"`{word}` is no headroom", hint="write a percentage, such as --headroom 5%")
    return float(match.group(1)) / 100


def seconds(word: str, flag: str) -> float:
    """Read `90s`, `15m`, `1h`; a bare number is seconds.

    Raises:
        UsageError: It is no time, or none at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", word.strip().lower())
    if match is None or float(match.group(1)) <= 0:
        raise UsageError(f"`{word}` is no time for {flag}", hint=f"write {flag} 90s, 15m or 1h")
    return float(match.group(1)) * SECONDS[match.group(2) or "s"]


def _say_loading() -> None:
    text.console(stderr=True).print("loading torch, deepspeed and transformers to see what fits ...")
