"""What the virtual GPU says of the tracks before anything is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dstune.cluster import Cluster
from dstune.estimator import ResultCache, bracket_plans
from dstune.estimator.result import Estimate, Refusal
from dstune.model import ModelSpec
from dstune.search.space import Track
from dstune.units import gib
from dstune.vocab import Verdict


def fit_tracks(
    tracks: Sequence[Track],
    model: ModelSpec,
    cluster: Cluster,
    *,
    num_parallel: int | None = None,
    cache: ResultCache | None = None,
    on_load: Callable[[], None] = lambda: None,
) -> list[Track]:
    """The tracks with the verdict on each of their plans."""
    plans = [track.plans for track in tracks]
    found = dict(bracket_plans(plans, model, cluster, num_parallel=num_parallel, cache=cache, on_load=on_load))
    return [judged(track, found[number]) for number, track in enumerate(tracks)]


def judged(track: Track, found: Mapping[int, Estimate | Refusal]) -> Track:
    """A track with what was estimated around its edge: below the first plan that does not fit, all fit."""
    verdicts: list[Verdict] = []
    for position in range(len(track.plans)):
        result = found.get(position)
        if isinstance(result, Refusal):
            verdicts.append(Verdict.OVER)
        elif result is not None:
            verdicts.append(_verdict(result))
        else:
            verdicts.append(Verdict.OVER if _is_beyond(position, found) else Verdict.FITS)
    estimates = {position: result for position, result in found.items() if isinstance(result, Estimate)}
    size = range(len(track.plans))
    return replace(
        track,
        verdicts=tuple(verdicts),
        needed_bytes=tuple(estimates[n].gpu.needed_bytes if n in estimates else None for n in size),
        reserved_bytes=tuple(estimates[n].gpu.peak_reserved_bytes if n in estimates else None for n in size),
        reason=_reason(found) if Verdict.FITS not in verdicts and Verdict.TIGHT not in verdicts else "",
    )


def _verdict(estimate: Estimate) -> Verdict:
    return Verdict.OVER if estimate.host.fits is False else estimate.gpu.verdict


def _is_beyond(position: int, found: Mapping[int, Estimate | Refusal]) -> bool:
    """Whether a smaller micro-batch was already too much."""
    return any(
        at < position and (isinstance(result, Refusal) or _verdict(result) is Verdict.OVER)
        for at, result in found.items()
    )


def _reason(found: Mapping[int, Estimate | Refusal]) -> str:
    first = found[min(found)]
    if isinstance(first, Refusal):
        return first.because[0] if first.because else first.message
    if first.host.fits is False:
        return "host memory is over at the smallest micro-batch"
    where = f" in {first.gpu.shortage.phase}" if first.gpu.shortage else ""
    short = first.gpu.needed_bytes - first.gpu.capacity_bytes
    return f"micro-batch {first.plan.micro_batch} is over by {gib(short)} GiB{where}"
