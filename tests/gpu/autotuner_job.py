"""The training script that DeepSpeed's autotuner starts, over and over: see tests/gpu/autotuner.py.

The model, data and engine are those of our own trials, so that only the tuning differs. The engine ends the process.
"""

import argparse
import base64
import contextlib
import json
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from dstune.model.build import build
from dstune.model.engine import make_engine, train_loss
from dstune.model.source import resolve
from dstune.plan import TrainingPlan

NUM_MICRO_STEPS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    options = parser.parse_args()
    config = json.loads(base64.urlsafe_b64decode(options.deepspeed_config))
    get_accelerator().set_device(options.local_rank)
    deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    plan = TrainingPlan(micro_batch=config["train_micro_batch_size_per_gpu"], seq_len=options.seq_len)
    built = build(resolve(options.model, trust_remote_code=False), plan, contextlib.nullcontext())
    with torch.no_grad():
        for param in built.module.parameters():
            param.normal_(0, 0.02) if param.dim() > 1 else param.fill_(1)
    engine = make_engine(built, plan, config)
    model: Any = built.module.config
    batch = built.make_batch(plan.micro_batch, plan.seq_len, device)
    batch["input_ids"].random_(0, model.vocab_size)
    for _ in range(NUM_MICRO_STEPS):
        engine.backward(train_loss(engine, batch))
        engine.step()
    return 0


if __name__ == "__main__":
    sys.exit(main())
