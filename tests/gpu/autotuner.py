"""Let DeepSpeed's autotuner tune a model on a real GPU, and write down what it tried, for how long, and what it chose.

python -m tests.gpu.autotuner gpt2-medium FOLDER OUT.json --global-batch 16 --seq-len 1024 --zero 1,2 --deadline-s 400

The autotuner calls `pdsh` after each experiment, to kill leftovers on other nodes; where there is none, a stand-in that
runs the command here is put on PATH.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

JOB = Path(__file__).with_name("autotuner_job.py")
PDSH = '#!/bin/sh\nshift 4\nexec "$@"\n'
LAST_LINES = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--zero", default="1,2")
    parser.add_argument("--deadline-s", type=float, default=400)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True)
    config = folder / "ds_config.json"
    config.write_text(json.dumps(_config(options.global_batch, [int(stage) for stage in options.zero.split(",")])))
    command = ["deepspeed", "--num_gpus", "1", "--autotuning", "tune", str(JOB), "--deepspeed_config", str(config)]
    command += ["--model", options.model, "--seq-len", str(options.seq_len)]
    start = time.monotonic()
    status = _run(command, folder, options.deadline_s)
    record = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")},
        "recorded": time.strftime("%Y-%m-%d"),
        "model": options.model,
        "config": json.loads(config.read_text()),
        "wall_s": time.monotonic() - start,
        "status": status,
        "experiments": [_experiment(path) for path in _experiments(folder)],
        "optimal": _read(folder / "autotuning_results" / "ds_config_optimal.json"),
        "summary": _text(folder / "autotuning_results" / "summary.txt"),
        "last_lines": _text(folder / "log.txt").splitlines()[-LAST_LINES:],
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _config(global_batch: int, stages: list[int]) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": sys.maxsize,
        "zero_optimization": {"stage": stages},
        "autotuning": {"enabled": True, "fast": True, "max_train_batch_size": global_batch},
    }


def _run(command: list[str], folder: Path, deadline_s: float) -> int | None:
    """The autotuner's exit status; None if the deadline came first."""
    environment = dict(os.environ)
    if shutil.which("pdsh") is None:
        stand_in = folder / "bin" / "pdsh"
        stand_in.parent.mkdir()
        stand_in.write_text(PDSH)
        stand_in.chmod(0o755)
        environment["PATH"] = f"{stand_in.parent}:{environment['PATH']}"
    with (folder / "log.txt").open("wb") as log:
        tuner = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            return tuner.wait(deadline_s)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(tuner.pid).children(recursive=True), psutil.Process(tuner.pid)]:
                process.kill()
            return None


def _experiments(folder: Path) -> list[Path]:
    found = (folder / "autotuning_results").glob("*/exp.json")
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _experiment(path: Path) -> dict[str, Any]:
    config = _read(path)["ds_config"]
    return {
        "name": path.parent.name,
        "started_s": path.stat().st_mtime,
        "zero_stage": config.get("zero_optimization", {}).get("stage"),
        "micro_batch": config.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "metrics": _read(path.with_name("metrics.json")),
        "last_line": next(iter(_text(path.with_name("stderr.log")).splitlines()[-1:]), ""),
    }


def _read(path: Path) -> Any:
    text = _text(path)
    return json.loads(text.splitlines()[0]) if text else None


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
