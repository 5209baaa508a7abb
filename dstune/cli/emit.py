"""`dstune emit-config`."""

import difflib
import hashlib
import json as jsonlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dstune import __version__
from dstune.atomicfile import write_whole
from dstune.cli import options
from dstune.cli.request import Words, read_cluster, read_plans
from dstune.dsconfig.document import read_ds_config
from dstune.dsconfig.target import TARGETS, Emission, emit
from dstune.errors import ConfigFileError, ExitCode, UsageError
from dstune.estimator.choice import choose
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.result import Estimate
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.report.machine import envelope
from dstune.report.text import console, describe
from dstune.search.journal import NAME as JOURNAL
from dstune.search.journal import read_lines
from dstune.search.space import read_global_batch
from dstune.search.trial import Trial
from dstune.units import gib
from dstune.vocab import DEFAULT_OPTIMIZER

SOURCE = "Source"
SIDECAR = ".dstune.json"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan and why it was taken.

    Attributes:
        plan: The plan.
        because: Sentences.
        details: What the sidecar keeps of it.
    """

    plan: TrainingPlan
    because: tuple[str, ...]
    details: dict[str, Any]


def emit_config(
    study: Annotated[
        Path | None,
        typer.Argument(metavar="STUDY", help="A search's folder or journal. Default: dstune-search."),
    ] = None,
    from_estimate: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Choose by estimate, without a search or a GPU.", rich_help_panel=SOURCE),
    ] = None,
    gpu: options.GpuWord = None,
    gpus: options.Gpus = None,
    nodes: options.Nodes = 1,
    host_memory: options.HostMemory = None,
    global_batch: Annotated[
        str | None, typer.Option(metavar="N|'N tokens'", help="Sequences (or tokens) a step.", rich_help_panel=SOURCE)
    ] = None,
    zero: options.Zero = "0,1,2,3",
    offload: options.OffloadWords = "all",
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: bf16, or fp16 on older GPUs.", rich_help_panel=options.TRAINING),
    ] = None,
    checkpointing: options.CheckpointingWord = "both",
    seq_len: options.SeqLen = None,
    optimizer: options.Optimizer = DEFAULT_OPTIMIZER,
    sequence_parallel: options.SequenceParallel = 1,
    attention: options.AttentionWord = "sdpa",
    target: Annotated[
        str, typer.Option("--for", metavar="|".join(TARGETS), help="Who reads it.", rich_help_panel=options.OUTPUT)
    ] = "deepspeed",
    base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep this ds_config's other keys.", rich_help_panel=options.OUTPUT),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: ds_config.json; `-` prints it.", rich_help_panel=options.OUTPUT),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 with a diff.", rich_help_panel=options.OUTPUT)
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Write nothing; show the diff.", rich_help_panel=options.OUTPUT)
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that was edited by hand.", rich_help_panel=options.OUTPUT)
    ] = False,
    jobs: options.Jobs = None,
    json: options.Json = False,
) -> ExitCode:
    """Write the ds_config of a search's fastest trial, or of an estimate; the same bytes for the same input.

    dstune emit-config dstune-search --output ds_config.json

    dstune emit-config --from-estimate llama-3-8b --gpu a100-80gb --gpus 8 --global-batch 256 --seq-len 2048

    dstune emit-config --from-estimate ./my-model --gpu h100 --global-batch 32 --for transformers --check
    """
    options.one_of(target, "--for", str, tuple(TARGETS))
    path = output or Path("ds_config.yaml" if target == "accelerate" else "ds_config.json")
    own = None if base is None else read_ds_config(base)
    if from_estimate is None:
        chosen: Chosen | None = _from_journal(study or Path("dstune-search"))
    else:
        if study is not None:
            raise UsageError("a study and --from-estimate are both given", hint="pass one of them")
        words = Words(
            zero, offload, precision or "all", checkpointing, None, None, seq_len, optimizer, attention,
            None, None, None, None, True, None, sequence_parallel,  # noqa: FBT003
        )  # fmt: skip
        machine = (gpu, gpus, nodes, host_memory)
        chosen = _from_estimate(from_estimate, machine, global_batch, words, jobs, is_free=precision is None)
    if chosen is None:
        text = "nothing fits: use more GPUs, a larger GPU or a shorter --seq-len"
        sys.stdout.write((envelope("emit-config", ExitCode.NEGATIVE) if json else text) + "\n")
        return ExitCode.NEGATIVE
    emission = emit(target, chosen.plan, own, str(path.with_suffix("")))
    if str(path) == "-":
        sys.stdout.write(emission.files[""])
        return ExitCode.OK
    files = _contents(path, emission, chosen)
    if check or diff:
        return _compare(files, fail=check, as_json=json)
    _write(path, files, force=force)
    _say(path, files, emission, chosen, as_json=json)
    return ExitCode.OK


def _from_journal(study: Path) -> Chosen:
    path = study / JOURNAL if study.is_dir() else study
    try:
        content = path.read_bytes()
    except OSError as error:
        hint = "run `dstune search` first, name its folder, or pass --from-estimate MODEL"
        raise ConfigFileError(f"there is no journal at `{path}`", hint=hint) from error
    _, trials = read_lines(path, content[: content.rfind(b"\n") + 1])
    done = [trial for trial in trials if trial.measurement is not None]
    if not done:
        raise UsageError(f"no trial of `{path}` ended well", hint="search on, with other settings")
    best = max(done, key=lambda trial: (trial.samples_per_s, -_reserved(trial), -trial.number))
    tokens = f"{best.tokens_per_s:,.0f} tokens a second"
    because = (f"the fastest of {len(trials)} trials, #{best.number}: {describe(best.plan)}, {tokens}",)
    return Chosen(best.plan, because, {"trial": best.number, "num_trials": len(trials)})


def _reserved(trial: Trial) -> int:
    return (trial.measurement.peak_reserved_bytes or 0) if trial.measurement else 0


def _from_estimate(
    model: str,
    machine: tuple[str | None, int | None, int, str | None],
    global_batch: str | None,
    words: Words,
    jobs: int | None,
    *,
    is_free: bool,
) -> Chosen | None:
    options.at_least_one(jobs, "--jobs")
    if global_batch is None:
        raise UsageError("--global-batch is missing", hint="pass --global-batch 256, the sequences of a step")
    spec = resolve(model)
    cluster = read_cluster(*machine)
    plans, _ = read_plans(words, spec, cluster)
    if is_free:
        half = "bf16" if GpuTraits(*cluster.gpu.compute_capability).has_bf16 else "fp16"
        plans = [plan for plan in plans if plan.precision.value == half]
    batch = read_global_batch(global_batch, plans[0].seq_len)
    found = choose(plans, spec, cluster, batch, jobs)
    if found is None:
        return None
    plan, needed = found.estimate.plan, found.estimate.gpu
    ranks = "ranks" if plan.sequence_parallel_size == 1 else "groups of ranks"
    sizes = f"{plan.micro_batch} x {plan.gradient_accumulation_steps} x {plan.data_parallel_size} {ranks} = {batch}"
    because = [f"the least communication and recomputation that fits: {describe(plan)}"]
    because += [f"batch {sizes}; needs {gib(needed.needed_bytes)} of {gib(needed.capacity_bytes)} GiB"]
    because += [
        f"passed over {describe(one.plan)}: "
        + (f"needs {gib(one.gpu.needed_bytes)} GiB" if isinstance(one, Estimate) else one.message)
        for one in found.passed_over
    ]
    details = {"needed_bytes": needed.needed_bytes, "capacity_bytes": needed.capacity_bytes}
    return Chosen(plan, tuple(because), details)


def _contents(path: Path, emission: Emission, chosen: Chosen) -> dict[Path, str]:
    """Each file with its content; the sidecar says where they came from."""
    files = {path.with_suffix(suffix) if suffix else path: text for suffix, text in emission.files.items()}
    sidecar = {
        "made_by": f"dstune {__version__} emit-config",
        "because": list(chosen.because),
        "plan": chosen.plan.model_dump(mode="json", exclude_none=True),
        "plan_digest": chosen.plan.digest(),
        **chosen.details,
        "sha256": {file.name: _digest(text) for file, text in files.items()},
    }
    return {**files, _sidecar(path): jsonlib.dumps(sidecar, indent=2) + "\n"}


def _sidecar(path: Path) -> Path:
    return path.with_suffix(SIDECAR)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigFileError(f"`{path}` cannot be read", because=(str(error),)) from error


def _compare(files: dict[Path, str], *, fail: bool, as_json: bool) -> ExitCode:
    """A unified diff from what is there to what would be written; the sidecar is left out."""
    lines: list[str] = []
    for file, text in files.items():
        if not file.name.endswith(SIDECAR):
            old = (_read(file) or "").splitlines(keepends=True)
            lines += difflib.unified_diff(old, text.splitlines(keepends=True), str(file), f"{file} (from dstune)")
    code = ExitCode.NEGATIVE if lines and fail else ExitCode.OK
    if as_json:
        data = {"is_stale": bool(lines), "diff": "".join(lines)}
        sys.stdout.write(envelope("emit-config", code, data) + "\n")
    else:
        sys.stdout.write("".join(lines) or "up to date\n")
    return code


def _write(path: Path, files: dict[Path, str], *, force: bool) -> None:
    """Nothing that dstune did not write, or that was changed since, is replaced without `--force`."""
    known = _known_digests(path)
    for file, text in files.items():
        old = _read(file)
        if old is None or old == text or force or file.name.endswith(SIDECAR):
            continue
        if known.get(file.name) != _digest(old):
            hint = "see what would change with --diff; pass --force, or keep its keys with --base"
            raise UsageError(f"`{file}` was not written by dstune, or was edited since", hint=hint)
    for file, text in files.items():
        write_whole(file, text)


def _known_digests(path: Path) -> dict[str, str]:
    try:
        found = jsonlib.loads(_sidecar(path).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _say(path: Path, files: dict[Path, str], emission: Emission, chosen: Chosen, *, as_json: bool) -> None:
    if as_json:
        data = {
            "files": [str(file) for file in files],
            "because": list(chosen.because),
            "usage": list(emission.usage),
            "plan": chosen.plan.model_dump(mode="json", exclude_none=True),
        }
        sys.stdout.write(envelope("emit-config", ExitCode.OK, data) + "\n")
        return
    for line in chosen.because:
        sys.stdout.write(f"{line[0].upper()}{line[1:]}\n")
    if emission.usage:
        sys.stdout.write("\nIn the training script:\n" + "".join(f"    {line}\n" for line in emission.usage))
    others = ", ".join(file.name for file in files if file != path)
    console(stderr=True).print(f"written: {path} (and {others})", soft_wrap=True)
