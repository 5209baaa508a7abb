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
    return Text.assemble(head, (f"{trial.ending.outcome.value:<8}", color), _numbers([trial]), f"{ratio:6.2f}")


def _numbers(same: Sequence[Trial]) -> str:
    """Throughput and memory of a setting's trials: the means, the widest spread, the highest peak."""
    measured = [trial.measurement for trial in same if trial.measurement is not None]
    rate = f"{_mean_tokens_per_s(same):>10,.0f} tokens/s +-{max(one.spread for one in measured) / 2:4.1%}"
    step = f"  step {fmean(one.step_s for one in measured):.3f} s"
    peaks = [one.peak_reserved_bytes for one in measured if one.peak_reserved_bytes is not None]
    predicted_bytes = same[0].predicted_bytes
    if not peaks:
        return rate + step
    predicted = "-" if predicted_bytes is None else gib(predicted_bytes)
    return f"{rate}{step}  reserved {gib(max(peaks))} GiB, predicted {predicted}"


def _mean_tokens_per_s(same: Sequence[Trial]) -> float:
    return fmean(trial.tokens_per_s for trial in same)


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
    return [f"{count} settings, at most {max_trials} trials and {budget_s / 60:.3g} minutes:", *lines]


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
    rates = {name: _mean_tokens_per_s(same) for name, same in by_setting.items()}
    top = rates[setting(best)]
    lines = [Text(), Text("By throughput (best = 1.00; measured more than once: the mean):")]
    ranked = sorted(rates, key=lambda name: -rates[name])
    lines += [Text(f"{rates[name] / top:6.2f}  {name:<38}{_numbers(by_setting[name])}") for name in ranked]
    alone = "" if best.has_communication else " (other ranks emulated: without communication)"
    lines += [Text(), Text(f"Fastest: {setting(best)}, {top:,.0f} tokens/s{alone}", "green")]
    return [*lines, Text(f"{len(trials)} trials; ended by: {stopped_by}")]


def noise_lines(trials: Sequence[Trial]) -> list[str]:
    """Warnings of measurements that scatter, and what would help."""
    measured = [(trial.number, trial.measurement) for trial in trials if trial.measurement]
    lines = []
    if noisy := [(one.spread, number) for number, one in measured if one.spread > NOISE]:
        spread, number = max(noisy)
        share = f"{len(noisy)} of {len(measured)} trials"
        lines.append(f"in {share} the steps differ by more than {NOISE:.0%}, at most {spread:.0%} in trial {number}")
    for name, same in _by_setting(trials).items():
        rates = [trial.samples_per_s for trial in same]
        if max(rates) > min(rates) * (1 + NOISE):
            lines.append(f"{name} differs by {max(rates) / min(rates) - 1:.0%} from one trial to the next")
    if lines:
        steps = 3 * max(one.num_steps for _, one in measured)
        lines.append(f"the ranking may be chance; see what else runs on the machine, or --restart --steps {steps}")
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
