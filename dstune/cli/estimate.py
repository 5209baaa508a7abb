"""`dstune estimate`."""

import shlex
import sys
from collections.abc import Callable, Iterator

from dstune.cli import options
from dstune.cli.request import Words, read_cluster, read_plans
from dstune.cluster import Cluster
from dstune.errors import BY_CODE, DstuneError, ExitCode, InternalError
from dstune.estimator import ResultCache, estimate_plans
from dstune.estimator.result import Estimate, Refusal
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.report import text
from dstune.report.machine import envelope, estimate_entry, refusal_entry
from dstune.report.table import Layout
from dstune.vocab import DEFAULT_OPTIMIZER, Routing

Result = Estimate | Refusal


def estimate(
    model: options.ModelWord,
    gpu: options.GpuWord = None,
    gpus: options.Gpus = None,
    nodes: options.Nodes = 1,
    host_memory: options.HostMemory = None,
    zero: options.Zero = "0,1,2,3",
    offload: options.OffloadWords = "all",
    precision: options.PrecisionWords = "all",
    checkpointing: options.CheckpointingWord = "off",
    micro_batch: options.MicroBatch = None,
    accumulation: options.Accumulation = None,
    seq_len: options.SeqLen = None,
    optimizer: options.Optimizer = DEFAULT_OPTIMIZER,
    sequence_parallel: options.SequenceParallel = 1,
    attention: options.AttentionWord = "sdpa",
    lora: options.Lora = None,
    freeze: options.Freeze = None,
    zero_init: options.ZeroInit = True,
    alloc_conf: options.AllocConf = None,
    routing: options.RoutingWord = "balanced",
    ds_config: options.DsConfig = None,
    plan: options.PlanFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    jobs: options.Jobs = None,
    cache: options.Cache = True,
    exit_zero: options.ExitZero = False,
    json: options.Json = False,
) -> ExitCode:
    """What each ZeRO stage, offload and precision needs on the GPU and the host; no GPU is used.

    dstune estimate llama-3-8b --gpu h100 --gpus 8 --micro-batch 2 --seq-len 4096

    dstune estimate ./my-model --gpu 24GiB --zero 2,3 --checkpointing both --micro-batch max

    dstune estimate gpt2 --gpu a100-80gb --gpus 8 --ds-config ds_config.json --json
    """
    options.at_least_one(jobs, "--jobs")
    spec = resolve(model, trust_remote_code=trust_remote_code)
    cluster = read_cluster(gpu, gpus, nodes, host_memory)
    words = Words(
        zero, offload, precision, checkpointing, micro_batch, accumulation, seq_len, optimizer, attention, lora,
        alloc_conf, ds_config, plan, zero_init, freeze, sequence_parallel,
    )  # fmt: skip
    plans, from_file = read_plans(words, spec, cluster)
    chosen = options.one_of(routing, "--routing", Routing, tuple(Routing))
    kept = ResultCache() if cache else None
    found = estimate_plans(
        plans,
        spec,
        cluster,
        num_parallel=jobs,
        routing=chosen,
        find_largest=words.wants_largest,
        cache=kept,
        on_load=lambda: _say_loading(len(plans)),
    )
    results = _and_then(_ordered(found), lambda: _say_unkept(kept))
    if json:
        done = list(results)
        _raise_if_hopeless(done)
        code = _exit_code(done, exit_zero=exit_zero)
        sys.stdout.write(_document(done, code) + "\n")
        return code
    return _show(
        results,
        plans,
        cluster,
        (spec.name, _carried(model, ds_config, host_memory, routing, trust_remote_code=trust_remote_code)),
        from_file=from_file,
        find_largest=words.wants_largest,
        exit_zero=exit_zero,
    )


def _carried(
    model: str, ds_config: str | None, host_memory: str | None, routing: str, *, trust_remote_code: bool
) -> str:
    """The model, and the options that a plan does not hold, for the next command."""
    values = {"--ds-config": ds_config, "--host-memory": host_memory}
    values["--routing"] = None if routing == Routing.BALANCED.value else routing
    said = [part for flag, value in values.items() if value is not None for part in (flag, value)]
    return shlex.join([model, *said, *(["--trust-remote-code"] if trust_remote_code else [])])


def _ordered(found: Iterator[tuple[int, Result]]) -> Iterator[Result]:
    """Results in the order of their plans, each as soon as those before it are done."""
    held: dict[int, Result] = {}
    due = 0
    for number, result in found:
        held[number] = result
        while due in held:
            yield held.pop(due)
            due += 1


def _show(
    results: Iterator[Result],
    plans: list[TrainingPlan],
    cluster: Cluster,
    names: tuple[str, str],
    *,
    from_file: bool,
    find_largest: bool,
    exit_zero: bool,
) -> ExitCode:
    """Print rows as they are done. `names` is the model's name and the words that the next command needs."""
    name, words = names
    out = text.console()
    layout = Layout.of(plans, find_largest=find_largest)
    done: list[Result] = []
    num_printed = 0
    for result in results:
        done.append(result)
        if num_printed == 0:
            if not isinstance(result, Estimate):
                continue  # the caption needs the model's size
            caption = text.caption(name, plans, cluster, result, find_largest=find_largest)
            out.print(caption, "", layout.header(), sep="\n")
        for number in range(num_printed, len(done)):
            out.print(layout.row(done[number], label="file" if from_file and number == 0 else None))
        num_printed = len(done)
    _raise_if_hopeless(done)
    out.print()
    for note in _notes(done):
        out.print(f"Note: {note}")
    for line in text.answer(done, words, cluster):
        out.print(line)
    return _exit_code(done, exit_zero=exit_zero)


def _notes(results: list[Result]) -> tuple[str, ...]:
    """What the numbers rest on, each once."""
    return tuple(dict.fromkeys(note for one in results if isinstance(one, Estimate) for note in one.notes))


def _and_then(results: Iterator[Result], finish: Callable[[], None]) -> Iterator[Result]:
    yield from results
    finish()


def _say_loading(num_plans: int) -> None:
    text.console(stderr=True).print(
        f"loading torch, deepspeed and transformers for {num_plans} plan{'s' if num_plans > 1 else ''} ..."
    )


def _say_unkept(kept: ResultCache | None) -> None:
    if kept is not None and kept.fault is not None:
        text.console(stderr=True).print(
            f"warning: estimates cannot be kept for next time (DSTUNE_CACHE_DIR, --no-cache): {kept.fault}",
            soft_wrap=True,
        )


def _raise_if_hopeless(results: list[Result]) -> None:
    """No plan could be run: then that is the error, not a table of nothing."""
    if any(isinstance(result, Estimate) for result in results):
        return
    first = results[0]
    assert isinstance(first, Refusal)
    kind: type[DstuneError] = BY_CODE.get(first.code, InternalError)
    error = kind(first.message, hint=first.hint, because=first.because)
    error.trace = first.traceback
    raise error


def _exit_code(results: list[Result], *, exit_zero: bool) -> ExitCode:
    fits = any(isinstance(result, Estimate) and result.fits for result in results)
    return ExitCode.OK if fits or exit_zero else ExitCode.NEGATIVE


def _document(results: list[Result], code: ExitCode) -> str:
    estimates = [estimate_entry(result) for result in results if isinstance(result, Estimate)]
    refused = [refusal_entry(result) for result in results if isinstance(result, Refusal)]
    return envelope("estimate", code, {"estimates": estimates, "refused": refused}, warnings=_notes(results))
