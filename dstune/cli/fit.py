"""Whether a ds_config fits on a GPU with a model, for `dstune lint --model M --gpu G`."""

from collections.abc import Iterator
from dataclasses import dataclass

from dstune.cli.request import base_plan, hidden_size, read_cluster
from dstune.cluster import Cluster
from dstune.dsconfig.document import plan_of, without_auto
from dstune.estimator import ResultCache, estimate_plans
from dstune.estimator.result import Estimate, Refusal
from dstune.lint.document import Document
from dstune.lint.rule import Problem, Surroundings
from dstune.model import ModelSpec
from dstune.model.source import resolve
from dstune.plan import TrainingPlan
from dstune.units import gib

MICRO = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a cluster.

    Attributes:
        model: What is trained.
        cluster: Where.
        seq_len: Tokens a sequence, or None for the model's own.
    """

    model: ModelSpec
    cluster: Cluster
    seq_len: int | None

    def problems(self, document: Document) -> Iterator[Problem]:
        """One if the file's own step does not fit."""
        base = base_plan(self.model, self.cluster, self.seq_len)
        config = without_auto(document.config, base, hidden_size(self.model))
        plan = plan_of(config, base)
        plan = plan.model_copy(update={"zero_init": plan.zero_stage == 3})
        result = self._run(plan, find_largest=False)
        if isinstance(result, Refusal):
            reason = result.because[0] if result.because else result.message
            yield Problem((), f"cannot be run with {self.model.name}: {reason}")
        elif not result.gpu.fits:
            yield Problem((MICRO,), self._say(plan, result))

    def _say(self, plan: TrainingPlan, result: Estimate) -> str:
        largest = self._run(plan, find_largest=True)
        fits = largest.largest_micro_batch if isinstance(largest, Estimate) else 0
        rest = f"{fits} does" if fits else "nor does any other; try a higher stage, offload or checkpointing"
        where = f"{self.model.name} on {self.cluster.world_size} x {self.cluster.gpu.name}"
        needed = f"{gib(result.gpu.needed_bytes)} of {gib(self.cluster.gpu.capacity_bytes)} GiB"
        return f"micro-batch {plan.micro_batch} does not fit: {rest} ({where}: {needed})"

    def _run(self, plan: TrainingPlan, *, find_largest: bool) -> Estimate | Refusal:
        found = estimate_plans([plan], self.model, self.cluster, find_largest=find_largest, cache=ResultCache())
        return next(result for _, result in found)


def read_surroundings(
    model: str | None, gpu: str | None, gpus: int | None, seq_len: int | None, world_size: int | None
) -> tuple[Surroundings, Fit | None]:
    """What the options say of the GPU and the model; whether it fits can be asked with both.

    Raises:
        UsageError: A name that is not known.
    """
    spec = None if model is None else resolve(model)
    cluster = None if gpu is None else read_cluster(gpu, gpus, 1, None)
    dtype = None if spec is None else spec.config.get("dtype", spec.config.get("torch_dtype"))
    around = Surroundings(
        world_size or gpus,
        None if cluster is None else (cluster.gpu.name, cluster.gpu.compute_capability),
        None if dtype is None else str(dtype).removeprefix("torch."),
    )
    return around, None if spec is None or cluster is None else Fit(spec, cluster, seq_len)
