"""The small ds_configs by which rules are shown and tested."""

import json
from typing import Any


def example(**keys: Any) -> str:
    """A file with these keys, and a micro-batch if they give no batch size."""
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    first = {} if sizes & set(keys) else {"train_micro_batch_size_per_gpu": 1}
    return json.dumps({**first, **keys}, indent=2) + "\n"


def zero(stage: int, **keys: Any) -> str:
    """A file with bf16 and a ZeRO block."""
    return example(bf16={"enabled": True}, zero_optimization={"stage": stage, **keys})
