"""A recorded run as data, and the job that predicts it."""

from pathlib import Path
from typing import Any

from dstune.estimator.allocconf import AllocConf
from dstune.estimator.job import Job
from dstune.model import ModelSpec
from dstune.plan import LoraPlan, TrainingPlan
from dstune.units import GIB
from dstune.vocab import Attention, Checkpointing, Offload, Precision, Routing

Row = dict[str, Any]

CHECKPOINTING = {
    None: Checkpointing.OFF,
    "nonreentrant": Checkpointing.ON,
    "reentrant": Checkpointing.REENTRANT,
    "deepspeed": Checkpointing.DEEPSPEED,
}
DEVICE_BYTES = 150_109_880_320
"""`device_total` of the recorded H200."""
MAX_MICRO_BATCH = 512
"""Far beyond every recorded boundary."""


def job_for(row: Row, tape_path: str) -> Job:
    """The job that predicts a row. Weights of recorded runs are zeros, so routers pick the first experts."""
    return Job(
        plan=_plan_for(row),
        model=model_for(row),
        compute_capability=(9, 0),
        num_multiprocessors=132,
        capacity_bytes=capacity_bytes(row) or DEVICE_BYTES,
        tape_path=tape_path,
        num_steps=row.get("steps", 2),
        history=tuple(range(1, MAX_MICRO_BATCH)) if "boundary" in row else None,
        routing=Routing.WORST,
    )


def capacity_bytes(row: Row) -> int | None:
    """The cap of a row, as `set_per_process_memory_fraction` makes it of a fraction of the device."""
    cap = row.get("memory_cap_gib")
    return int(cap * GIB / DEVICE_BYTES * DEVICE_BYTES) if cap else None


def conf_of(row: Row) -> AllocConf:
    """The allocator's settings of a row."""
    return AllocConf.parse(row.get("allocator_conf"))


def model_for(row: Row) -> ModelSpec:
    """The model of a row."""
    config = dict(row["model"])
    class_name = config.pop("model_class")
    return ModelSpec(name=config["model_type"], config=config, class_name=class_name)


def _plan_for(row: Row) -> TrainingPlan:
    options = row["model_options"]
    ds_config = row["ds_config"]
    lora = options.get("lora")
    return TrainingPlan(
        zero_stage=ds_config.get("zero_optimization", {}).get("stage", 0),
        offload=Offload.NONE,
        precision=Precision.BF16,
        micro_batch=row["micro_batch"],
        gradient_accumulation_steps=ds_config.get("gradient_accumulation_steps", 1),
        seq_len=row.get("seq_len") or 1,
        activation_checkpointing=CHECKPOINTING[options.get("ckpt")],
        world_size=row["world_size"],
        attention=Attention(options.get("attn", "sdpa")),
        attention_mask=bool(options.get("mask")),
        lora=LoraPlan(r=lora["r"], targets=tuple(lora["targets"])) if lora else None,
        load_dtype=options.get("load_dtype"),
        client_optimizer=options.get("client_opt"),
        alloc_conf=row.get("allocator_conf"),
        zero_init=bool(options.get("zero_init")),
        ds_config=ds_config,
    )


def kind_of(row: Row) -> str:
    """`boundary`, `capped` or `peak`."""
    if "boundary" in row:
        return "boundary"
    return "capped" if row.get("memory_cap_gib") else "peak"


def load_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    import json

    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
