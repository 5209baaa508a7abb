"""What CUDA chooses and takes, as numbers."""

import gzip
import json
import re
from pathlib import Path

import pytest

from dstune.estimator.attention import AttentionCall, AttentionKernel, choose_kernel
from dstune.estimator.gpu import GpuTraits
from dstune.estimator.reduction import Buffers, buffers, iteration_dims
from dstune.units import MIB

A100, H200, RTX_3090, V100, B200 = (
    GpuTraits(8, 0),
    GpuTraits(9, 0, 132),
    GpuTraits(8, 6, 82),
    GpuTraits(7, 0, 80),
    GpuTraits(10, 0, 148),
)
EVENTS = sorted((Path(__file__).parents[1] / "data/measured/events").glob("ops-*.json.gz"))
ACCUMULATOR = {"bfloat16": 4, "float16": 4, "float32": 4, "float64": 8}


def call(**changes: object) -> AttentionCall:
    values: dict[str, object] = {
        "dtype": "bfloat16", "num_heads": 8, "num_kv_heads": 8, "query_len": 512, "key_len": 512, "head_dim": 64,
        "value_head_dim": 64, "has_mask": False, "mask_requires_grad": False, "is_causal": True, "dropout": 0.0,
        "requires_grad": True,
    }  # fmt: skip
    return AttentionCall(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        (H200, {}, AttentionKernel.CUDNN),
        (B200, {}, AttentionKernel.CUDNN),
        (H200, {"has_mask": True}, AttentionKernel.CUDNN),
        (H200, {"dtype": "float32"}, AttentionKernel.EFFICIENT),
        (A100, {}, AttentionKernel.FLASH),
        (A100, {"has_mask": True}, AttentionKernel.EFFICIENT),
        (A100, {"dtype": "float32"}, AttentionKernel.EFFICIENT),
        (A100, {"head_dim": 288, "value_head_dim": 288, "dtype": "float32"}, AttentionKernel.EFFICIENT),
        (A100, {"head_dim": 70, "value_head_dim": 70, "dtype": "float32"}, AttentionKernel.MATH),
        (RTX_3090, {"head_dim": 208, "value_head_dim": 208}, AttentionKernel.EFFICIENT),
        (V100, {"dtype": "float16"}, AttentionKernel.EFFICIENT),
        (V100, {}, AttentionKernel.MATH),
        (V100, {"dtype": "float16", "num_kv_heads": 2}, AttentionKernel.MATH),
    ],
)
def test_the_attention_kernel_is_the_one_that_cuda_chooses(
    gpu: GpuTraits, changes: dict[str, object], expected: AttentionKernel
) -> None:
    assert choose_kernel(call(**changes), gpu) is expected


def test_workspaces_follow_the_compute_capability() -> None:
    assert H200.cublas_workspace_bytes == B200.cublas_workspace_bytes == 32 * MIB
    assert A100.cublas_workspace_bytes == V100.cublas_workspace_bytes == 8519680
    assert [gpu.has_bf16 for gpu in (A100, V100)] == [True, False]


def recorded_reductions() -> list[tuple[str, str, list[int], set[int], Buffers]]:
    """Every sum, mean and norm that the GPU ran, with the buffers that it took."""
    found = {}
    for path in EVENTS:
        events = [event for event in json.loads(gzip.decompress(path.read_bytes())) if event[0] == "alloc"]
        for index, event in enumerate(events):
            match = re.fullmatch(r"aten::(sum|mean|linalg_vector_norm) (\w+)\[([\d, ]*)\](.*)", event[4])
            if match is None or match[2] not in ACCUMULATOR or (index and events[index - 1][4] == event[4]):
                continue
            shape = [int(size) for size in match[3].split(",") if size.strip()]
            named = re.search(r"\[([-\d, ]+)\]", match[4])
            reduced = {int(dim) % len(shape) for dim in named[1].split(",")} if named else set(range(len(shape)))
            taken = [other[2] for other in events[index + 1 : index + 3] if other[4] == event[4]]
            if len(taken) == 2 and taken[0] == event[2]:
                continue  # the same operation again, not its buffers
            found[event[4]] = (match[1], match[2], shape, reduced, Buffers(*taken) if len(taken) == 2 else Buffers())
    return list(found.values())


def test_reduction_buffers_are_those_of_every_recorded_reduction() -> None:
    cases = recorded_reductions()
    assert sum(bool(expected.accumulators) for *_rest, expected in cases) > 40
    for name, dtype, shape, reduced, expected in cases:
        strides = [1] * len(shape)
        for index in range(len(shape) - 2, -1, -1):
            strides[index] = strides[index + 1] * shape[index + 1]
        got = buffers(iteration_dims(shape, strides, reduced), ACCUMULATOR[dtype], H200)
        assert got == expected, (name, dtype, shape, reduced)
