"""Rules about ZeRO and offload: keys that their stage or their device does not read."""

from collections.abc import Iterator

from dstune.lint.rule import Case, Check, Deed, Problem, Remove, Replace, Rule, Severity, when
from dstune.lint.rules.example import example, zero

ZERO = "zero_optimization"
SOURCE = "deepspeed runtime/engine.py, _configure_zero_optimizer"
STAGE3_ONLY = (
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
)  # fmt: skip
"""Read by `DeepSpeedZeroOptimizer_Stage3` and `DeepSpeedZeRoOffload` alone."""
SMALL_BUCKET = 1_000_000
"""Elements under which most matrices of a language model are reduced one at a time."""
LARGEST_STAGE = 3


def _unread(keys: tuple[str, ...], is_unread: str) -> Check:
    """Keys of the ZeRO block that nothing reads below stage 3."""

    def check(case: Case) -> Iterator[Problem]:
        if 0 <= case.stage < LARGEST_STAGE:
            for key in keys:
                if case.has(f"{ZERO}.{key}"):
                    yield Problem((ZERO, key), is_unread.format(key=key, stage=case.stage), Remove())

    return check


def _nvme_only(block: str, keys: tuple[str, ...]) -> Check:
    def check(case: Case) -> Iterator[Problem]:
        if case.offload(block) in {"cpu", "none"}:
            for key in keys:
                if case.has(f"{ZERO}.{block}.{key}"):
                    message = f"`{key}` is read with device nvme only, not with {case.offload(block)}"
                    yield Problem((ZERO, block, key), message, Remove())

    return check


def _no_path(case: Case) -> Iterator[Problem]:
    for block in ("offload_optimizer", "offload_param"):
        if case.offload(block) == "nvme" and not case.get(f"{ZERO}.{block}.nvme_path"):
            yield Problem((ZERO, block), "device nvme needs `nvme_path`, a folder on the local disk")


def _device_unknown(case: Case) -> Iterator[Problem]:
    for block in ("offload_optimizer", "offload_param"):
        if case.offload(block) not in {"cpu", "nvme", "none", "auto"}:
            path = (ZERO, block, "device")
            yield Problem(path, f"`{case.offload(block)}` is no device: it is cpu, nvme or none")


def _below(stage: int, case: Case) -> bool:
    return 0 <= case.stage < stage


def _uses_nvme(case: Case) -> bool:
    return "nvme" in {case.offload("offload_optimizer"), case.offload("offload_param")}


def _offload_without_device(case: Case) -> Iterator[Problem]:
    for block in ("offload_optimizer", "offload_param"):
        if isinstance(case.get(f"{ZERO}.{block}"), dict) and not case.has(f"{ZERO}.{block}.device"):
            yield Problem((ZERO, block), f"`{block}` names no device: nothing is offloaded")


RULES = (
    Rule(
        "offload-param-below-stage-3", Severity.WARNING, "`offload_param` below stage 3",
        "Below stage 3 every GPU holds all parameters: the block does nothing, without a word. Use stage 3, or take it"
        " out.",
        zero(2, offload_param={"device": "cpu"}), zero(3, offload_param={"device": "cpu"}),
        when(lambda case: _below(3, case) and case.offload("offload_param") != "none", f"{ZERO}.offload_param",
             "has no effect at stage {stage}: parameters are partitioned, and offloaded, at stage 3 only", Remove()),
        Deed.ACCEPTS, "", SOURCE, is_fixable=True,
    ),
    Rule(
        "offload-optimizer-without-zero", Severity.WARNING, "`offload_optimizer` at stage 0",
        "Stage 0 is plain data parallelism: the optimizer's states stay on the GPU. Use stage 1, 2 or 3.",
        zero(0, offload_optimizer={"device": "cpu"}), zero(1, offload_optimizer={"device": "cpu"}),
        when(lambda case: case.stage == 0 and case.offload("offload_optimizer") != "none", f"{ZERO}.offload_optimizer",
             "has no effect at stage 0"), Deed.ACCEPTS, "", SOURCE,
    ),
    Rule(
        "offload-without-device", Severity.WARNING, "an offload block without `device`",
        "The default device is none: the block does nothing. Name cpu or nvme.",
        zero(2, offload_optimizer={"pin_memory": True}), zero(2, offload_optimizer={"device": "cpu"}),
        _offload_without_device, Deed.ACCEPTS, "", "deepspeed runtime/zero/offload_config.py",
    ),
    Rule(
        "offload-device-unknown", Severity.ERROR, "an offload device that does not exist",
        "DeepSpeed knows cpu, nvme and none.",
        zero(2, offload_optimizer={"device": "gpu"}), zero(2, offload_optimizer={"device": "cpu"}),
        _device_unknown, Deed.REFUSES, "Input should be", "deepspeed runtime/zero/offload_config.py",
    ),
    Rule(
        "nvme-without-path", Severity.ERROR, "offload to NVMe without `nvme_path`",
        "It is parsed without a word, and fails when the first tensor is to be swapped out. Name a folder on a local"
        " disk.",
        zero(3, offload_optimizer={"device": "nvme"}),
        zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/local_nvme"}),
        _no_path, Deed.ACCEPTS, "", "deepspeed runtime/swap_tensor/optimizer_utils.py",
    ),
    Rule(
        "nvme-below-stage-3", Severity.WARNING, "optimizer offload to NVMe below stage 3",
        "Stages 1 and 2 take nvme for cpu: the states lie in host memory. Use stage 3, or say cpu.",
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/local_nvme"}),
        zero(2, offload_optimizer={"device": "cpu"}),
        when(lambda case: case.stage in {1, 2} and case.offload("offload_optimizer") == "nvme",
             f"{ZERO}.offload_optimizer.device", "stage {stage} keeps the optimizer's states in host memory, not on"
             " NVMe"), Deed.ACCEPTS, "", "deepspeed runtime/engine.py, zero_cpu_offload",
    ),
    Rule(
        "stage3-key-below-stage-3", Severity.WARNING, "a `stage3_...` key below stage 3",
        "The other stages do not read it. It does no harm, and no good.",
        zero(2, stage3_max_live_parameters=1000), zero(2), _unread(STAGE3_ONLY, "`{key}` has no effect at stage"
        " {stage}"), Deed.IGNORES, "", SOURCE, is_fixable=True,
    ),
    Rule(
        "sub-group-size-below-stage-3", Severity.WARNING, "`sub_group_size` below stage 3",
        "Only stage 3 updates the optimizer in sub-groups.", zero(1, sub_group_size=1000), zero(1),
        _unread(("sub_group_size",), "`{key}` has no effect at stage {stage}"), Deed.IGNORES, "", SOURCE,
        is_fixable=True,
    ),
    Rule(
        "hpz-below-stage-3", Severity.WARNING, "`zero_hpz_partition_size` below stage 3",
        "The secondary partition (ZeRO++) exists at stage 3 only.", zero(2, zero_hpz_partition_size=8), zero(2),
        _unread(("zero_hpz_partition_size",), "`{key}` has no effect at stage {stage}"), Deed.IGNORES, "",
        "deepspeed runtime/zero/parameter_offload.py", is_fixable=True,
    ),
    Rule(
        "quantized-weights-below-stage-3", Severity.WARNING, "`zero_quantized_weights` below stage 3",
        "Weights are gathered, and so quantized (ZeRO++), at stage 3 only.", zero(2, zero_quantized_weights=True),
        zero(2), _unread(("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
        "`{key}` has no effect at stage {stage}"), Deed.IGNORES, "", SOURCE, is_fixable=True,
    ),
    Rule(
        "zero-keys-at-stage-0", Severity.WARNING, "ZeRO settings at stage 0",
        "Stage 0 turns ZeRO off, and with it buckets and overlap. Set the stage, or take the keys out.",
        zero(0, overlap_comm=True, contiguous_gradients=True), zero(1, overlap_comm=True),
        lambda case: [Problem((ZERO, key), f"`{key}` has no effect at stage 0")
                      for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients")
                      if case.stage == 0 and case.get(f"{ZERO}.{key}") is True], Deed.ACCEPTS, "", SOURCE,
    ),
    Rule(
        "zero-without-stage", Severity.WARNING, "a `zero_optimization` block without `stage`",
        "The default stage is 0: ZeRO is off, whatever else the block says.",
        example(bf16={"enabled": True}, zero_optimization={"reduce_bucket_size": 1e8}),
        zero(2, reduce_bucket_size=100_000_000),
        when(lambda case: isinstance(case.get(ZERO), dict) and "stage" not in case.block(ZERO), ZERO,
             "no `stage` is given, so it is 0: ZeRO is off"), Deed.ACCEPTS, "", "deepspeed runtime/zero/config.py",
    ),
    Rule(
        "stage-unknown", Severity.ERROR, "a ZeRO stage that does not exist", "Stages are 0, 1, 2 and 3.",
        zero(4), zero(3), when(lambda case: case.stage not in range(4) and case.get(f"{ZERO}.stage") != "auto",
        f"{ZERO}.stage", "stage `{value}` does not exist: it is 0, 1, 2 or 3"),
        Deed.REFUSES, "Input should be", "deepspeed runtime/zero/config.py, ZeroStageEnum",
    ),
    Rule(
        "stage-as-string", Severity.NOTE, "the stage as a string",
        "DeepSpeed converts it; Hugging Face's checks compare it with a number and take it for another stage.",
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": "2"}}\n', zero(2),
        lambda case: [Problem((ZERO, "stage"), "the stage is a string: write the number", Replace(case.stage))]
        if isinstance(case.get(f"{ZERO}.stage"), str) and case.stage in range(4) else [],
        Deed.ACCEPTS, "", "deepspeed runtime/zero/config.py", is_fixable=True,
    ),
    Rule(
        "nvme-keys-without-nvme", Severity.WARNING, "settings of swapping without NVMe",
        "Buffers, pipelining and the limit of host memory belong to NVMe; with device cpu nothing reads them.",
        zero(3, offload_param={"device": "cpu", "max_in_cpu": 1000}), zero(3, offload_param={"device": "cpu"}),
        lambda case: [
            *_nvme_only("offload_param", ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"))(case),
            *_nvme_only("offload_optimizer", ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write",
                                              "fast_init"))(case),
        ], Deed.IGNORES, "", "deepspeed runtime/zero/parameter_offload.py; stage3.py, _configure_tensor_swapping",
        is_fixable=True,
    ),
    Rule(
        "aio-without-nvme", Severity.NOTE, "an `aio` block without NVMe offload",
        "Asynchronous I/O is used for NVMe offload only.", example(aio={"queue_depth": 8}), example(),
        when(lambda case: case.has("aio") and not _uses_nvme(case), "aio",
             "has no effect: nothing is offloaded to NVMe"),
        Deed.ACCEPTS, "", "deepspeed runtime/engine.py, aio_config",
    ),
    Rule(
        "partial-offload-below-stage-3", Severity.ERROR, "`offload_optimizer.ratio` below stage 3",
        "Twin-Flow, which offloads a part, exists at stage 3 only: DeepSpeed raises an assertion.",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.3}), zero(2, offload_optimizer={"device": "cpu"}),
        when(lambda case: _below(3, case) and case.get(f"{ZERO}.offload_optimizer.ratio", 1.0) != 1.0,
             f"{ZERO}.offload_optimizer.ratio", "`ratio` needs stage 3, this is stage {stage}", Remove()),
        Deed.REFUSES, "Partial offloading only", "deepspeed runtime/zero/config.py, offload_ratio_check",
        is_fixable=True,
    ),
    Rule(
        "super-offload-below-stage-3", Severity.WARNING, "`super_offload` below stage 3",
        "SuperOffload has an optimizer for stage 3 only.",
        zero(2, offload_optimizer={"device": "cpu", "super_offload": True}),
        zero(2, offload_optimizer={"device": "cpu"}),
        when(lambda case: _below(3, case) and case.get(f"{ZERO}.offload_optimizer.super_offload") is True,
             f"{ZERO}.offload_optimizer.super_offload", "`super_offload` has no effect at stage {stage}"),
        Deed.ACCEPTS, "", SOURCE,
    ),
    Rule(
        "legacy-stage1", Severity.ERROR, "`legacy_stage1`",
        "The old implementation is gone: DeepSpeed raises an exception at the start.", zero(1, legacy_stage1=True),
        zero(1), when(lambda case: case.get(f"{ZERO}.legacy_stage1") is True, f"{ZERO}.legacy_stage1",
        "the old stage 1 has been removed", Remove()), Deed.FAILS, "deprecated version of ZeRO Stage 1", SOURCE,
        is_fixable=True,
    ),
    Rule(
        "unpinned-offload", Severity.WARNING, "offload with `pin_memory` off",
        "Copies from pageable memory are slower and hold up the GPU. The default is on since 0.19; turn it off only"
        " where page-locked memory is scarce.",
        zero(2, offload_optimizer={"device": "cpu", "pin_memory": False}),
        zero(2, offload_optimizer={"device": "cpu", "pin_memory": True}),
        lambda case: [Problem((ZERO, block, "pin_memory"), "copies to and from pageable memory are slow")
                      for block in ("offload_optimizer", "offload_param")
                      if case.get(f"{ZERO}.{block}.pin_memory") is False and case.offload(block) == "cpu"],
        Deed.ACCEPTS, "", "deepspeed runtime/zero/offload_config.py",
    ),
    Rule(
        "small-bucket", Severity.NOTE, "a reduce bucket smaller than most matrices",
        "Gradients are reduced a bucket at a time: under a million elements each matrix is a collective of its own.",
        zero(2, reduce_bucket_size=500), zero(2, reduce_bucket_size=200_000_000),
        when(lambda case: 0 < (case.number(f"{ZERO}.reduce_bucket_size") or 0) < SMALL_BUCKET and case.stage > 0,
             f"{ZERO}.reduce_bucket_size", "{value} elements: nearly every gradient is reduced by itself"),
        Deed.ACCEPTS, "", "deepspeed runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads",
    ),
    Rule(
        "negative-bucket", Severity.ERROR, "a bucket size below zero",
        "DeepSpeed takes sizes from 0 on, in elements.", zero(2, allgather_bucket_size=-1), zero(2),
        lambda case: [Problem((ZERO, key), f"`{key}` is below zero") for key in case.block(ZERO)
                      if key.endswith("_bucket_size") and (case.number(f"{ZERO}.{key}") or 0) < 0],
        Deed.REFUSES, "greater than or equal", "deepspeed runtime/zero/config.py",
    ),
    Rule(
        "no-gather-on-save", Severity.NOTE, "stage 3 without `stage3_gather_16bit_weights_on_model_save`",
        "save_16bit_model, and a trainer's save, then write no weights: they must be put together from the checkpoint"
        " with zero_to_fp32.py. Set it if you want weights at the end.",
        zero(3), zero(3, stage3_gather_16bit_weights_on_model_save=True),
        when(lambda case: case.stage == LARGEST_STAGE and not any(
            case.get(f"{ZERO}.stage3_gather_{kind}_weights_on_model_save") for kind in ("16bit", "fp16")), ZERO,
            "the 16-bit weights are not gathered when the model is saved"),
        Deed.ACCEPTS, "", "deepspeed runtime/engine.py, save_16bit_model",
    ),
    Rule(
        "stage3-overlap-off", Severity.NOTE, "`overlap_comm` off at stage 3",
        "It is on by default at stage 3, where the next layer's parameters are gathered while this one computes.",
        zero(3, overlap_comm=False), zero(3),
        when(lambda case: case.stage == LARGEST_STAGE and case.get(f"{ZERO}.overlap_comm") is False,
             f"{ZERO}.overlap_comm", "communication and computation take turns: slower, with less memory"),
        Deed.ACCEPTS, "", "deepspeed runtime/zero/config.py, overlap_comm_valid",
    ),
)  # fmt: skip
"""The table."""
