"""Tables and messages for people. Sizes in GiB; colour only repeats what a word says."""

import shlex
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dstune.cluster import Cluster, Gpu
from dstune.errors import DstuneError
from dstune.estimator.choice import cost_of
from dstune.estimator.overhead import overhead
from dstune.estimator.result import Estimate, Refusal
from dstune.model.presets import Preset
from dstune.plan import TrainingPlan
from dstune.units import count, gib
from dstune.vocab import CLIENT_OPTIMIZERS, DEFAULT_OPTIMIZER, Attention, Checkpointing

WIDE = 160
"""Columns when standard output is no terminal: nothing may be cut."""


def caption(
    name: str, plans: Sequence[TrainingPlan], cluster: Cluster, first: Estimate, *, find_largest: bool = False
) -> str:
    """What does not vary, above the table."""
    micro_batch = "largest micro-batch" if find_largest else f"micro-batch {plans[-1].micro_batch}"
    plan = plans[-1]
    checkpointings = {one.activation_checkpointing for one in plans}
    checkpointing = f", checkpointing {plan.activation_checkpointing.value}" if len(checkpointings) == 1 else ""
    zero_init = ", ZeRO 3 under zero.Init" if any(one.zero_init for one in plans) else ""
    gpus = f"{cluster.world_size} x {cluster.gpu.name}"
    nodes = f" on {cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
    shared = f", {plan.sequence_parallel_size} share each sequence" if plan.sequence_parallel_size > 1 else ""
    outside = overhead(cluster.world_size)
    host = "" if cluster.host_bytes is None else f", host {gib(cluster.host_bytes)} a node"
    return (
        f"{name}, {count(first.num_parameters)} parameters, {optimizer_word(plan)}, accumulation "
        f"{plan.gradient_accumulation_steps}{checkpointing}{zero_init}\n"
        f"{gpus}{nodes}{shared}, {micro_batch} x {plan.seq_len}; GiB: GPU "
        f"{gib(cluster.gpu.capacity_bytes)}{host}; outside torch {gib(outside.size_bytes)} (assumed)"
    )


def answer(results: Sequence[Estimate | Refusal], words: str, cluster: Cluster) -> list[Text]:
    """The last lines: what to do. `words` are the model's, and options that no plan knows."""
    fitting = [result for result in results if isinstance(result, Estimate) and result.fits]
    if not fitting:
        estimates = [result for result in results if isinstance(result, Estimate)]
        least = min(estimates, key=lambda one: one.gpu.needed_bytes, default=None)
        said = "Nothing fits" if least is None else f"Nothing fits; least on the GPU: {describe(least.plan)}"
        return [Text(said, "red"), Text("Next: a smaller --micro-batch, --checkpointing on, --offload, or more --gpus")]
    best = min(fitting, key=lambda one: cost_of(one.plan))
    if best.largest_micro_batch is not None:
        return _answer_largest(fitting, best)
    return [
        Text(f"Fits with the least communication and recomputation: {describe(best.plan)}", "green"),
        Text(f"Next, a larger micro-batch: {_next_command(best.plan, words, cluster)}", "cyan"),
    ]


def _answer_largest(fitting: Sequence[Estimate], cheapest: Estimate) -> list[Text]:
    largest = max(fitting, key=lambda one: (one.plan.micro_batch, tuple(-part for part in cost_of(one.plan))))
    return [
        Text(f"Fits with the least communication and recomputation: {describe(cheapest.plan)}", "green"),
        Text(f"The largest micro-batch: {describe(largest.plan)}", "green"),
    ]


def _next_command(plan: TrainingPlan, words: str, cluster: Cluster) -> str:
    """The same plan with twice the micro-batch. `words` are the model's, and options that no plan knows."""
    nodes = f" --nodes {cluster.num_nodes}" if cluster.num_nodes > 1 else ""
    gpu = cluster.gpu.name.replace(" ", "-")
    return (
        f"dstune estimate {words} --gpu {gpu} --gpus {cluster.gpus_per_node}{nodes} --zero {plan.zero_stage} "
        f"--offload {plan.offload.value} --precision {plan.precision.value} "
        f"--checkpointing {plan.activation_checkpointing.value} --micro-batch {2 * plan.micro_batch} "
        f"--seq-len {plan.seq_len}{_unusual(plan)}"
    )


def _unusual(plan: TrainingPlan) -> str:
    """Options that are only said where they are not the default."""
    lora = plan.lora and f"r={plan.lora.r},targets={':'.join(plan.lora.targets)}"
    values = {
        "--accumulation": plan.gradient_accumulation_steps if plan.gradient_accumulation_steps > 1 else None,
        "--optimizer": optimizer_word(plan) if optimizer_word(plan) != DEFAULT_OPTIMIZER else None,
        "--sequence-parallel": plan.sequence_parallel_size if plan.sequence_parallel_size > 1 else None,
        "--attention": plan.attention.value if plan.attention is not Attention.SDPA else None,
        "--lora": lora,
        "--freeze": ",".join(plan.freeze) or None,
        "--alloc-conf": plan.alloc_conf,
    }
    said = [f" {flag} {shlex.quote(str(value))}" for flag, value in values.items() if value is not None]
    if plan.zero_stage == 3 and not plan.zero_init:
        said.append(" --no-zero-init")
    return "".join(said)


def optimizer_word(plan: TrainingPlan) -> str:
    """What `--optimizer` calls it."""
    names = {optimizer: word for word, optimizer in CLIENT_OPTIMIZERS.items()}
    return plan.optimizer if plan.client_optimizer is None else names[plan.client_optimizer]


def describe(plan: TrainingPlan) -> str:
    """A plan in a few words."""
    offload = "no offload" if plan.offload == "none" else f"offload {plan.offload.value}"
    checkpointing = "" if plan.activation_checkpointing is Checkpointing.OFF else ", checkpointing"
    return f"ZeRO {plan.zero_stage}, {offload}, {plan.precision.value}{checkpointing}, micro-batch {plan.micro_batch}"


def error_lines(error: DstuneError) -> list[Text]:
    """`error:`, causes, a blank line, `hint:`."""
    lines = [Text.assemble(("error: ", "red"), error.message)]
    lines.extend(Text(f"  because: {cause}") for cause in error.because)
    if error.hint:
        lines.extend((Text(), Text.assemble(("hint: ", "cyan"), error.hint)))
    return lines


def gpus_table(gpus: Sequence[Gpu]) -> Table:
    """The catalogue."""
    table = Table("name", box=SIMPLE_HEAD)
    for header in ("GiB", "capability", "multiprocessors"):
        table.add_column(header, justify="right")
    table.add_column("source")
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability))
        table.add_row(gpu.name, gib(gpu.capacity_bytes), capability, str(gpu.num_multiprocessors), gpu.source)
    return table


def models_table(models: Sequence[Preset]) -> Table:
    """The presets."""
    table = Table("name", "class", "values of", box=SIMPLE_HEAD)
    for preset in models:
        table.add_row(preset.name, preset.class_name, preset.source)
    return table


def console(*, stderr: bool = False) -> Console:
    """A console that never cuts what is piped."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, soft_wrap=True, width=WIDE)
