"""What DeepSpeed really does with each rule's examples: python -m tests.lint.deeds OUT.json, a process of its own.

Each example is parsed from a file. Those that are said to fail later are trained for one step, on the CPU.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dstune.lint.rule import Deed, Rule
from dstune.lint.rules import RULES


class Heard(logging.Handler):
    """What DeepSpeed's logger says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def parse(path: Path) -> tuple[str, list[str]]:
    """The exception, if any, and the warnings."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    heard = Heard()
    logger.addHandler(heard)
    try:
        DeepSpeedConfig(str(path))
    except Exception as error:  # noqa: BLE001 - it is what we ask for
        return f"{type(error).__name__}: {error}", heard.said
    finally:
        logger.removeHandler(heard)
    return "", heard.said


def train(config: dict[str, Any]) -> str:
    """One step of a small model on the CPU; the exception, if any."""
    import deepspeed
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    given = {} if "optimizer" in config else {"optimizer": torch.optim.AdamW(module.parameters())}
    try:
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=config, **given
        )
        if "activation_checkpointing" in config:
            deepspeed.checkpointing.configure(None, deepspeed_config=config)
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(torch.ones(1, 4, dtype=dtype)).float().sum())
        engine.step()
    except Exception as error:  # noqa: BLE001 - it is what we ask for
        return f"{type(error).__name__}: {error}"
    return ""


def observe(rule: Rule, text: str, folder: Path) -> dict[str, Any]:
    """What becomes of one example."""
    import hjson

    path = folder / "ds_config.json"
    path.write_text(text)
    error, warnings = parse(path)
    seen = {"error": error, "warnings": warnings, "trained": None}
    if rule.deed is Deed.FAILS and not error:
        seen["trained"] = train(dict(hjson.loads(text)))
    return seen


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        deepspeed.init_distributed("gloo", verbose=False)
        seen = {
            rule.id: {kind: observe(rule, getattr(rule, kind), Path(name)) for kind in ("bad", "good")}
            for rule in RULES.values()
            if rule.deed is not Deed.NOT_ASKED
        }
    Path(sys.argv[1]).write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main()
