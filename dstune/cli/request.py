"""From the words of a command line to what the estimator takes; every fault is found before anything slow."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dstune.cli.options import MAX, at_least_one, listed, number_or_max, one_of
from dstune.cluster import Cluster
from dstune.cluster.catalogue import find_gpu
from dstune.cluster.detect import detect_gpu, detect_host_bytes
from dstune.dsconfig.document import plan_of, read_ds_config, vary, without_auto
from dstune.errors import ConfigFileError, UsageError
from dstune.estimator.allocconf import AllocConf
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.grid import grid
from dstune.jsonfile import read_json
from dstune.model import ModelSpec
from dstune.plan import LoraPlan, TrainingPlan
from dstune.units import parse_bytes
from dstune.vocab import CLIENT_OPTIMIZERS, Attention, Checkpointing, ClientOptimizer, Offload, Precision

DEFAULT_SEQ_LEN = 1024
LEARNED_POSITIONS = {
    "gpt2": ("n_positions", 1024),
    "bert": ("max_position_embeddings", 512),
    "opt": ("max_position_embeddings", 2048),
    "roberta": ("max_position_embeddings", 512),
    "gpt_bigcode": ("n_positions", 1024),
    "electra": ("max_position_embeddings", 512),
}
"""Model types whose positions are a table, so that a longer sequence cannot run: where its length stands in a
configuration, and transformers' default for one that does not say."""


@dataclass(frozen=True, slots=True)
class Words:
    """The options of `estimate` that make plans, as they were typed."""

    zero: str
    offload: str
    precision: str
    checkpointing: str
    micro_batch: str | None
    accumulation: int | None
    seq_len: int | None
    optimizer: str
    attention: str
    lora: str | None
    alloc_conf: str | None
    ds_config: str | None
    plan: str | None
    zero_init: bool
    freeze: str | None
    sequence_parallel: int = 1

    @property
    def wants_largest(self) -> bool:
        """Whether the largest micro-batch is to be found."""
        return self.micro_batch == MAX


def read_cluster(gpu: str | None, gpus: int | None, nodes: int, host_memory: str | None) -> Cluster:
    """The cluster that the options name; without `--gpu` this machine is asked.

    Raises:
        UsageError, MachineError: An unknown GPU, an impossible number, no GPU here.
    """
    at_least_one(gpus, "--gpus")
    at_least_one(nodes, "--nodes")
    host_bytes = parse_bytes(host_memory, "host memory") if host_memory else None
    if gpu is not None:
        return Cluster(gpu=find_gpu(gpu), num_nodes=nodes, gpus_per_node=gpus or 1, host_bytes=host_bytes)
    found, count = detect_gpu()
    return Cluster(
        gpu=found, num_nodes=nodes, gpus_per_node=gpus or count, host_bytes=host_bytes or detect_host_bytes()
    )


def read_plans(words: Words, model: ModelSpec, cluster: Cluster) -> tuple[list[TrainingPlan], bool]:
    """The plans of the table, and whether the first is a file's own.

    Raises:
        UsageError, ConfigFileError: Whatever is wrong with them.
    """
    if words.plan is not None:
        return [_plan_from_file(Path(words.plan))], True
    micro_batch = number_or_max(words.micro_batch, "--micro-batch")
    for number, flag in (
        (words.accumulation, "--accumulation"),
        (words.seq_len, "--seq-len"),
        (words.sequence_parallel, "--sequence-parallel"),
    ):
        at_least_one(number, flag)
    AllocConf.parse(words.alloc_conf)  # finds a fault before anything slow
    base = TrainingPlan(
        micro_batch=micro_batch or 1,
        gradient_accumulation_steps=words.accumulation or 1,
        seq_len=_seq_len(words.seq_len, model),
        optimizer=words.optimizer,
        client_optimizer=_client_optimizer(words.optimizer),
        world_size=cluster.world_size,
        sequence_parallel_size=words.sequence_parallel,
        ranks_per_node=cluster.gpus_per_node,
        attention=one_of(words.attention, "--attention", Attention, tuple(Attention)),
        attention_mask=None,
        lora=_lora(words.lora),
        freeze=tuple(part for part in (words.freeze or "").split(",") if part),
        alloc_conf=words.alloc_conf,
    )
    _refuse_uneven(base)
    plans = _rows(words, base, cluster)
    if words.ds_config is None:
        return plans, False
    config = without_auto(read_ds_config(Path(words.ds_config)), base, hidden_size(model))
    first = plan_of(config, base)
    _refuse_uneven(first)
    first = first.model_copy(update={"zero_init": words.zero_init and first.zero_stage == 3})
    sizes = {
        "micro_batch": micro_batch or first.micro_batch,
        "gradient_accumulation_steps": words.accumulation or first.gradient_accumulation_steps,
        "optimizer": first.optimizer,
        "sequence_parallel_size": first.sequence_parallel_size,
    }
    return [first, *(vary(config, plan.model_copy(update=sizes)) for plan in plans)], True


def _refuse_uneven(plan: TrainingPlan) -> None:
    """Ranks and tokens must go into the groups that share sequences."""
    for number, what in ((plan.world_size, "GPUs"), (plan.seq_len, "tokens of a sequence")):
        if number % plan.sequence_parallel_size:
            raise UsageError(
                f"--sequence-parallel {plan.sequence_parallel_size} does not divide the {number} {what}",
                hint="it must divide the GPUs of all nodes together, and --seq-len",
            )


def _client_optimizer(word: str) -> ClientOptimizer | None:
    """What the script hands to DeepSpeed, if the word has a package in front; else DeepSpeed makes its own."""
    if "." not in word:
        return None
    return one_of(word, "--optimizer", CLIENT_OPTIMIZERS.__getitem__, tuple(CLIENT_OPTIMIZERS))


def _rows(words: Words, base: TrainingPlan, cluster: Cluster) -> list[TrainingPlan]:
    checkpointing = "off,on" if words.checkpointing == "both" else words.checkpointing
    plans = grid(
        base,
        listed(words.zero, "--zero", int, ("0", "1", "2", "3")),
        listed(words.offload, "--offload", Offload, tuple(Offload)),
        _precisions(words.precision, cluster),
        listed(checkpointing, "--checkpointing", Checkpointing, tuple(Checkpointing)),
        zero_init=words.zero_init,
    )
    if not plans:
        raise UsageError(
            f"--offload {words.offload} has no effect at --zero {words.zero}",
            hint="optimizer offload needs ZeRO 1, 2 or 3; parameter offload needs ZeRO 3",
        )
    return plans


def _precisions(text: str, cluster: Cluster) -> list[Precision]:
    """Those asked for; `all` means those the GPU has."""
    traits = GpuTraits(*cluster.gpu.compute_capability)
    missing = {Precision.BF16: not traits.has_bf16, Precision.FP16: not traits.has_fp16}
    asked = listed(text, "--precision", Precision, tuple(Precision))
    if text.strip() == "all":
        return [precision for precision in asked if not missing.get(precision)]
    for precision in asked:
        if missing.get(precision):
            raise UsageError(f"`{cluster.gpu.name}` has no {precision}", hint="pass --precision fp32 or another GPU")
    return asked


def _seq_len(asked: int | None, model: ModelSpec) -> int:
    kind = str(model.config.get("model_type", ""))
    key, default = LEARNED_POSITIONS.get(kind, ("", None))
    most = model.config.get(key, default)
    if most is not None and asked is not None and asked > most:
        raise UsageError(
            f"--seq-len {asked} is more than the {most} positions of `{model.name}`", hint=f"at most {most}"
        )
    return asked or min(DEFAULT_SEQ_LEN, most or DEFAULT_SEQ_LEN)


def base_plan(model: ModelSpec, cluster: Cluster, seq_len: int | None) -> TrainingPlan:
    """What holds where a ds_config says nothing."""
    at_least_one(seq_len, "--seq-len")
    return TrainingPlan(
        micro_batch=1,
        seq_len=_seq_len(seq_len, model),
        world_size=cluster.world_size,
        ranks_per_node=cluster.gpus_per_node,
        attention_mask=None,
    )


def hidden_size(model: ModelSpec) -> int:
    """Width of the model, by which trainers size buckets."""
    for key in ("hidden_size", "n_embd", "d_model"):
        if isinstance(model.config.get(key), int):
            return int(model.config[key])
    return 768


def _lora(text: str | None) -> LoraPlan | None:
    """Read `r=16,targets=q_proj:v_proj`; commas between targets work too."""
    if text is None:
        return None
    rank, _, targets = text.partition(",targets=")
    names = tuple(name for name in targets.replace(":", ",").split(",") if name)
    if not rank.startswith("r=") or not rank[2:].isdigit() or not names or int(rank[2:]) < 1:
        raise UsageError(f"`{text}` is no LoRA", hint="write --lora r=16,targets=q_proj,v_proj")
    return LoraPlan(r=int(rank[2:]), targets=names)


def _plan_from_file(path: Path) -> TrainingPlan:
    data = read_json(path, "take a plan from `data.estimates[].plan` of --json")
    try:
        return TrainingPlan.model_validate(data)
    except ValidationError as error:
        faults = tuple(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigFileError(
            f"{path}:1: no plan", hint="take one from `data.estimates[].plan` of --json", because=faults
        ) from error
