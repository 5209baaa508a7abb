"""Run a small job without one patch at a time: a separate program, since the patches change the whole process.

Prints one JSON object: target -> `same` if the job's tape is the one that all patches give, else what happened.
"""

import contextlib
import hashlib
import json
import os
import sys
from typing import Any

from dstune.estimator import worker
from dstune.estimator.job import Job
from dstune.model import ModelSpec
from dstune.plan import TrainingPlan
from dstune.vocab import Offload

TINY = ModelSpec(
    name="tiny",
    config={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128,
            "tie_word_embeddings": False},
    class_name="GPT2LMHeadModel",
)  # fmt: skip
PARTITIONED = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}
"""Parameters this small are partitioned only if they may not persist."""
NEEDS: dict[str, dict[str, Any]] = {
    "cpu_adam": {"offload": Offload.OPTIMIZER},
    "fused_lion": {"optimizer": "Lion"},
    "cpu_lion": {"optimizer": "Lion", "offload": Offload.OPTIMIZER},
    "cpu_adagrad": {"optimizer": "Adagrad", "offload": Offload.OPTIMIZER},
    "_orig_torch_tensor": {"zero_stage": 3, "zero_init": True},
    "record_stream": {"zero_stage": 3, "ds_config": PARTITIONED},
}
"""Part of a target -> what the plan must have for it to matter."""


def job_for(target: str) -> Job:
    """The smallest job that a patch matters for."""
    changes = next((need for part, need in NEEDS.items() if part in target), {})
    plan = TrainingPlan(**{"zero_stage": 2, "world_size": 2, "seq_len": 32, **changes})
    return Job(plan=plan, model=TINY, compute_capability=(8, 0), capacity_bytes=1 << 34, tape_path="")


def outcome(accelerator: Any, target: str, dropped: str | None) -> str:
    """What the job does in a fork of its own: a digest of its tape, or the error."""
    from dstune.estimator import patches, runtime

    read, write = os.pipe()
    if os.fork() == 0:
        patches.PATCHES = tuple(patch for patch in patches.PATCHES if patch.target != dropped)
        said = "ended"
        with contextlib.suppress(BaseException), contextlib.redirect_stdout(sys.stderr):
            try:
                _, tape = runtime.run(
                    job_for(target), accelerator, lambda error: (os.write(write, repr(error).encode()), os._exit(0))
                )
                said = hashlib.sha256(repr([*tape]).encode()).hexdigest()
            except BaseException as error:  # noqa: BLE001 - the border of the fork
                said = repr(error)
        os.write(write, said[:300].encode())
        os._exit(0)
    os.close(write)
    os.wait()
    with os.fdopen(read) as pipe:
        return pipe.read()


def main() -> None:
    """Compare each patch's job with and without it."""
    accelerator = worker._import_everything()
    from dstune.estimator import patches

    expected = {}
    found = {}
    for patch in patches.PATCHES:
        key = job_for(patch.target).model_dump_json()
        if key not in expected:
            expected[key] = outcome(accelerator, patch.target, None)
        without = outcome(accelerator, patch.target, patch.target)
        found[patch.target] = "same" if without == expected[key] else without or "the process died"
    print(json.dumps({"expected": sorted(expected.values()), "without": found}))


if __name__ == "__main__":
    main()
