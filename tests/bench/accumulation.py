"""Write docs/explanation/accumulation.md from recorded trials: python -m tests.bench.accumulation --write."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "explanation" / "accumulation.md"
GLOBAL_BATCH = 48
MODELS = {"gpt2m": ("GPT-2 medium", 40), "qwen05": ("Qwen2.5-0.5B", 40), "tiny": ("TinyLlama-1.1B", 80)}
"""Name, and the cap in GiB whose rows are shown."""
STEPS = (1, 2, 4, 8, 16)
HEAD = f"""# What accumulation costs, and what it saves

Is a larger micro-batch faster? Does more accumulation help? The figures below are trials on one NVIDIA H200, with
random data and the real DeepSpeed. On one GPU no gradients travel: with several, ZeRO 2 and 3 reduce gradients in each
micro-step, so that there accumulation costs communication besides.

**In short**

- At a fixed global batch, take the largest micro-batch that fits. Small micro-batches leave the GPU waiting.
- Accumulation helps where the optimizer's step is dear: with an offloaded optimizer, one step instead of many.
- Where the optimizer is on the GPU, more accumulation gains less, and with a large model next to nothing.
- It never saves GPU memory at a given micro-batch; it lets a smaller micro-batch make the same global batch.

`dstune search` finds out for your model and node: `--global-batch` is kept exactly, and each micro-batch has the
accumulation that follows.

## Micro-batch against accumulation, global batch {GLOBAL_BATCH}

Tokens a second, in thousands. A step is (accumulation - 1) x a first micro-step + the last one, which holds the
optimizer: both were timed, two micro-steps at a time, and the median of all repetitions is shown. Steps this short are
noisy, by 10 to 30 %: where a first micro-step was slower than the last one (Qwen2.5-0.5B, ZeRO 1 offloaded), it is
noise.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of a table."""

    stage: int
    offload: str
    is_checkpointed: bool

    def __str__(self) -> str:
        offload = {"gpu": "", "opt": ", optimizer offloaded", "both": ", optimizer and parameters offloaded"}
        return f"ZeRO {self.stage}{offload[self.offload]}{', checkpointing' if self.is_checkpointed else ''}"


Points = dict[Setting, dict[int, tuple[float, float]]]


def points_of(model: str, cap_gib: int) -> tuple[Points, int]:
    """Seconds of the first and the last micro-step of each micro-batch, and the sequence length."""
    found: dict[Setting, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    seq_len = 0
    for row in rows():
        _, name, stage, offload, checkpointing = row["name"].split("-")
        if name != model:
            continue
        seq_len = row["seq_len"]
        setting = Setting(int(stage[1:]), offload, checkpointing == "ckpt")
        for point in row["points"]:
            if point["cap_gib"] == cap_gib and point["status"] == "ok":
                first, *_, last = point["micro_step_s"]
                found[setting][point["micro_batch"]].append((first, last))
    medians = {
        setting: {size: (_median(pairs, 0), _median(pairs, 1)) for size, pairs in sizes.items()}
        for setting, sizes in found.items()
    }
    return medians, seq_len


def _median(pairs: list[tuple[float, float]], position: int) -> float:
    return statistics.median(pair[position] for pair in pairs)


def rows() -> Iterator[dict[str, Any]]:
    """The recorded trials."""
    for line in (DATA / "measured" / "throughput.jsonl").read_text().splitlines():
        yield json.loads(line)


def step_s(pair: tuple[float, float], accumulation: int) -> float:
    """Seconds of a whole step."""
    return (accumulation - 1) * pair[0] + pair[1]


def batch_table(model: str) -> str:
    """Settings by micro-batches, at the same global batch."""
    title, cap_gib = MODELS[model]
    points, seq_len = points_of(model, cap_gib)
    sizes = sorted({size for one in points.values() for size in one if GLOBAL_BATCH % size == 0})
    lines = [
        f"\n### {title}, sequences of {seq_len}, GPU capped to {cap_gib} GiB\n",
        "| setting | " + " | ".join(f"{size} x {GLOBAL_BATCH // size}" for size in sizes) + " |",
        "|---|" + "--:|" * len(sizes),
    ]
    for setting in sorted(points, key=str):
        cells = [
            f"{GLOBAL_BATCH * seq_len / step_s(points[setting][size], GLOBAL_BATCH // size) / 1000:.1f}"
            if size in points[setting]
            else ""
            for size in sizes
        ]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def accumulation_table() -> str:
    """More micro-steps a step at the largest micro-batch of each setting: what the optimizer's share comes to."""
    lines = [
        "\n## More accumulation, the same micro-batch\n",
        "Tokens a second relative to no accumulation, at the largest micro-batch that was tried.\n",
        "| model | setting | micro-batch | " + " | ".join(f"x {number}" for number in STEPS) + " |",
        "|---|---|--:|" + "--:|" * len(STEPS),
    ]
    for model, (title, cap_gib) in MODELS.items():
        points, _ = points_of(model, cap_gib)
        for setting in sorted(points, key=str):
            if setting.is_checkpointed:
                continue
            size = max(points[setting])
            pair = points[setting][size]
            ratios = [number * step_s(pair, 1) / step_s(pair, number) for number in STEPS]
            lines.append(f"| {title} | {setting} | {size} | " + " | ".join(f"{one:.2f}" for one in ratios) + " |")
    return "\n".join(lines)


def whole_steps_table() -> str:
    """Trials of `dstune search` itself, whole steps timed."""
    lines = [
        "\n## Whole steps, timed as such\n",
        "GPT-2 medium, global batch 16 of 1024 tokens, GPU capped to 24 GiB: trials of `dstune search`, all of them.\n",
        "| setting | micro-batch x accumulation | tokens/s | spread of steps | optimizer's step, ms |",
        "|---|--:|--:|--:|--:|",
    ]
    for line in (DATA / "studies" / "grid-gpt2-medium-24gib.jsonl").read_text().splitlines()[1:]:
        trial = json.loads(line)["trial"]
        plan, measured = trial["plan"], trial["measurement"]
        tokens = plan["micro_batch"] * plan["gradient_accumulation_steps"] * plan["seq_len"] / measured["step_s"]
        setting = Setting(plan["zero_stage"], "opt" if plan["offload"] == "optimizer" else "gpu", is_checkpointed=False)
        lines.append(
            f"| {setting} | {plan['micro_batch']} x {plan['gradient_accumulation_steps']} | {tokens:,.0f} "
            f"| {measured['spread']:.0%} | {1000 * measured['optimizer_step_s']:.0f} |"
        )
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    first = next(rows())
    versions = (
        f"\nRecorded with torch {first['torch']} and deepspeed {first['deepspeed']} on one {first['gpu']}, 2026-12.\n"
    )
    tables = "\n".join(batch_table(model) for model in MODELS)
    return f"{HEAD}\n{tables}\n{accumulation_table()}\n{whole_steps_table()}\n{versions}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        sys.stdout.write(page())
