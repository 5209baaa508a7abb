"""Run a small job without one patch at a time: a separate program, since the patches change the whole process.

Prints one JSON object: target -> `same` if the job's tape is the one that all patches give, else what happened.
"""

import contextlib
import gc
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dstune.estimator import worker
from dstune.estimator.job import Job
from dstune.model import ModelSpec
from dstune.plan import TrainingPlan
from dstune.vocab import Checkpointing, Offload

TINY = ModelSpec(
    name="tiny",
    config={"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128,
            "tie_word_embeddings": False},
    class_name="GPT2LMHeadModel",
)  # fmt: skip
LLAMA = ModelSpec(
    name="llama",
    config={"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128},
    class_name="LlamaForCausalLM",
)  # fmt: skip
INDEXING = ModelSpec(name="indexing", function="tests.examples.own_model:make_indexing")
MODELS = {"tensor_parallel_states": LLAMA, "_validate_vocab": LLAMA, "Tensor.__": INDEXING,
          "is_autocast": LLAMA}  # fmt: skip
"""Part of a target -> the model that it matters for, if not the smallest."""
PARTITIONED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}
"""Parameters this small are partitioned only if they may not persist."""
HALF_AUTOCAST = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}
FOLDER = "FOLDER"
"""Stands for a folder of the job's own."""


def partitioned(**zero: Any) -> dict[str, Any]:
    """A plan with ZeRO 3 that partitions everything."""
    config = {**PARTITIONED, "zero_optimization": {**PARTITIONED["zero_optimization"], **zero}}
    return {"zero_stage": 3, "ds_config": config}


NVME = {"device": "nvme", "nvme_path": FOLDER, "pin_memory": True}
ON_NVME = partitioned(offload_optimizer=NVME, offload_param=NVME)
PARALLEL = {"zero_stage": 1, "ds_config": {
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {
    "cpu_adam": {"offload": Offload.OPTIMIZER},
    "fused_lion": {"optimizer": "Lion"},
    "cpu_lion": {"optimizer": "Lion", "offload": Offload.OPTIMIZER},
    "cpu_adagrad": {"optimizer": "Adagrad", "offload": Offload.OPTIMIZER},
    "_orig_torch_tensor": {"zero_stage": 3, "zero_init": True},
    "record_stream": {"zero_stage": 3, "ds_config": PARTITIONED},
    "swap_tensor": ON_NVME,
    "stage3:os": ON_NVME,
    "QuantizerBuilder": partitioned(zero_quantized_weights=True),
    "superoffload": partitioned(offload_optimizer={"device": "cpu", "pin_memory": True, "super_offload": True}),
    "tensor_parallel_states": PARALLEL,
    "_validate_vocab": PARALLEL,
    "autocast": {"ds_config": HALF_AUTOCAST, "activation_checkpointing": Checkpointing.ON},
}
"""Part of a target -> what the plan must have for it to matter."""


def job_for(target: str, folder: Path) -> Job:
    """The smallest job that a patch matters for."""
    changes = next((need for part, need in NEEDS.items() if part in target), {})
    changes = json.loads(json.dumps(changes).replace(FOLDER, str(folder)))
    model = next((model for part, model in MODELS.items() if part in target), TINY)
    plan = TrainingPlan(**{"zero_stage": 2, "world_size": 2, "seq_len": 32, **changes})
    return Job(plan=plan, model=model, compute_capability=(8, 0), capacity_bytes=1 << 34, tape_path="")


def outcome(accelerator: Any, target: str, dropped: str | None) -> str:
    """What the job does in a fork of its own: a digest of its tape and of its folder, or the error."""
    from dstune.estimator import patches, runtime

    read, write = os.pipe()
    folder = Path(tempfile.mkdtemp())
    if "shutil" in target:
        (folder / "zero_stage_3/bfloat16params/rank0/of-another-run").mkdir(parents=True)
    if os.fork() == 0:
        patches.PATCHES = tuple(patch for patch in patches.PATCHES if patch.target != dropped)
        said = "ended"
        with contextlib.suppress(BaseException), contextlib.redirect_stdout(sys.stderr):
            try:
                _, tape = runtime.run(
                    job_for(target, folder),
                    accelerator,
                    lambda error: (os.write(write, repr(error).encode()), os._exit(0)),
                )
                files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
                said = hashlib.sha256(repr([*tape, files]).encode()).hexdigest()
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
    import torch

    from dstune.estimator import patches
    from dstune.model.build import preload

    for model in (TINY, *MODELS.values()):
        preload(model)
    gc.freeze()  # as the worker does: a fork need neither import nor collect what is there already
    expected = {}
    found = {}
    for patch in patches.PATCHES:
        if patch.target == "torch:Tensor.__hash__":  # what it prevents shows only now and then
            tensor = torch.empty(1)
            found[patch.target] = "the hash is an address" if hash(tensor) == id(tensor) else "same"
            continue
        key = job_for(patch.target, Path("shutil" if "shutil" in patch.target else "any")).model_dump_json()
        if key not in expected:
            expected[key] = outcome(accelerator, patch.target, None)
        without = outcome(accelerator, patch.target, patch.target)
        found[patch.target] = "same" if without == expected[key] else without or "the process died"
    print(json.dumps({"expected": sorted(expected.values()), "without": found}))


if __name__ == "__main__":
    main()
