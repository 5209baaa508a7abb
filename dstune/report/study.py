"""What a search says: a line for each trial, the table, the answer."""

import json
from collections.abc import Sequence
from statistics import fmean

from rich.text import Text

from dstune.dsconfig import varied_keys
from dstune.search.space import Track
from dstune.search.trial import Outcome, Trial
from dstune.units import gib
from dstune.vocab import Verdict

NOISE = 0.03
"""Spread of a trial's steps, or difference of two equal trials, beyond which a ranking is doubtful."""
COLORS = {Outcome.OK: "green", Outcome.OOM: "yellow"}


def setting(trial: Trial) -> str:
    """A trial's setting in a few words."""
    plan = trial.plan
    offload = "" if plan.offload == "none" else f" {plan.offload.value}"
    checkpointing = "" if plan.activation_checkpointing == "off" else " ckpt"
    varied = "".join(f" {key}={json.dumps(value)}" for key, value in varied_keys(plan).items())
    return (
        f"ZeRO {plan.zero_stage}{offload}{checkpointing} {plan.precision.value} "
        f"{plan.micro_batch} x {plan.gradient_accumulation_steps}{varied}"
    )


def trial_line(trial: Trial, best: Trial | None) -> Text:
    """Number, setting (micro-batch x accumulation), outcome, throughput, memory, ratio to the best so far."""
    head = f"#{trial.number:<3}{setting(trial):<38}"
    color = COLORS.get(trial.ending.outcome, "red")
    if trial.measurement is None:
        where = "" if trial.ending.rank is None else f" (rank {trial.ending.rank})"
        said = f"{trial.ending.detail}{where}; log: {trial.log_folder}"
        return Text.assemble(head, (f"{trial.ending.outcome.value:<8}", color), said)
    ratio = trial.samples_per_s / best.samples_per_s if best and best.samples_per_s else 1.0
    return Text.assemble(head, (f"{trial.ending.outcome.value:<8}", color), _numbers(trial), f"{ratio:6.2f}")


def _numbers(trial: Trial) -> str:
    measured = trial.measurement
    assert measured is not None
    rate = f"{trial.tokens_per_s:>10,.0f} tokens/s +-{measured.spread / 2:4.1%}"
    step = f"  step {measured.step_s:.3f} s"
    if measured.peak_reserved_bytes is None:
        return rate + step
    predicted = "-" if trial.predicted_bytes is None else gib(trial.predicted_bytes)
    return f"{rate}{step}  reserved {gib(measured.peak_reserved_bytes)} GiB, predicted {predicted}"


def plan_lines(tracks: Sequence[Track], max_trials: int, budget_s: float) -> list[str]:
    """What will be tried, and what is left out and why."""
    lines = []
    for track in tracks:
        if track.base is not None:
            continue
        plan = track.plans[0]
        offload = "no offload" if plan.offload == "none" else f"offload {plan.offload.value}"
        checkpointing = "" if plan.activation_checkpointing == "off" else ", checkpointing"
        name = f"ZeRO {plan.zero_stage}, {offload}, {plan.precision.value}{checkpointing}"
        lines.append(f"  {name:<44} {_sizes(track)}")
    count = sum(len(track.candidates()) for track in tracks)
    num_varied = sum(track.base is not None for track in tracks)
    if num_varied:
        lines.append(f"  the best of them varied in one key (--axes): {num_varied} variants in all")
    return [f"{count} settings, at most {max_trials} trials and {budget_s / 60:.0f} minutes:", *lines]


def _sizes(track: Track) -> str:
    if track.reason:
        return f"left out: {track.reason}"
    fits = [plan.micro_batch for plan, verdict in zip(track.plans, track.verdicts, strict=True) if verdict == "fits"]
    tight = [
        plan.micro_batch for plan, verdict in zip(track.plans, track.verdicts, strict=True) if verdict is Verdict.TIGHT
    ]
    parts = [f"micro-batch {', '.join(map(str, fits))}"] if fits else []
    return "; ".join([*parts, *([f"tight {', '.join(map(str, tight))}"] if tight else [])])


def answer_lines(best: Trial | None, trials: Sequence[Trial], stopped_by: str) -> list[Text]:
    """The last lines: the table by throughput, and what to take."""
    if best is None:
        return [Text("No trial ended well", "red"), *_reasons(trials)]
    by_setting = _by_setting(trials)
    rates = {name: fmean(one.samples_per_s for one in same) for name, same in by_setting.items()}
    top = rates[setting(best)]
    lines = [Text(), Text("By throughput (best = 1.00; measured more than once: the mean):")]
    ranked = sorted(rates, key=lambda name: -rates[name])
    lines += [Text(f"{rates[name] / top:6.2f}  {name:<38}{_numbers(by_setting[name][0])}") for name in ranked]
    alone = "" if best.has_communication else " (other ranks emulated: without communication)"
    lines += [Text(), Text(f"Fastest: {setting(best)}, {best.tokens_per_s:,.0f} tokens/s{alone}", "green")]
    return [*lines, Text(f"{len(trials)} trials; ended by: {stopped_by}")]


def noise_lines(trials: Sequence[Trial]) -> list[str]:
    """Warnings of measurements that scatter, and what would help."""
    lines = [
        f"trial {trial.number} scatters by {trial.measurement.spread:.0%} over {trial.measurement.num_steps} steps"
        for trial in trials
        if trial.measurement and trial.measurement.spread > NOISE
    ]
    for name, same in _by_setting(trials).items():
        rates = [trial.samples_per_s for trial in same]
        if max(rates) > min(rates) * (1 + NOISE):
            lines.append(f"{name} differs by {max(rates) / min(rates) - 1:.0%} from one trial to the next")
    return lines


def _by_setting(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The trials that ended well, repeats together."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.measurement:
            found.setdefault(setting(trial), []).append(trial)
    return found


def _reasons(trials: Sequence[Trial]) -> list[Text]:
    return [
        Text(f"  #{trial.number} {setting(trial)}: {trial.ending.outcome.value}, {trial.ending.detail}")
        for trial in trials
    ]
