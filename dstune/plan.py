"""`TrainingPlan`, the one noun: all that decides how much memory a training step takes on one rank."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dstune.vocab import DEFAULT_OPTIMIZER, Attention, Checkpointing, ClientOptimizer, Offload, Precision

Positive = Annotated[int, Field(ge=1)]


class LoraPlan(BaseModel):
    """Low-rank adapters through peft; everything else is frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    r: Positive
    """Rank of the adapters."""
    targets: tuple[str, ...]
    """Names of the modules that get an adapter."""


class TrainingPlan(BaseModel):
    """One way to train one model on one cluster. Frozen, hashable by digest, serialisable."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage."""
    offload: Offload = Offload.NONE
    """What is kept on the host."""
    precision: Precision = Precision.BF16
    """What DeepSpeed trains in."""
    micro_batch: Positive = 1
    """Sequences (or images) a GPU a micro-step."""
    gradient_accumulation_steps: Positive = 1
    """Micro-steps a step."""
    seq_len: Positive = 1024
    """Tokens a sequence. Image models ignore it."""
    activation_checkpointing: Checkpointing = Checkpointing.OFF
    """Whether the forward is recomputed in the backward."""
    optimizer: str = DEFAULT_OPTIMIZER
    """DeepSpeed's `optimizer.type`."""
    world_size: Positive = 1
    """Ranks, all nodes together."""
    sequence_parallel_size: Positive = 1
    """Ranks that share each sequence (Ulysses); the world's are divided into groups of so many."""
    ranks_per_node: Positive = 1
    """Processes that share one host's memory."""
    attention: Attention = Attention.SDPA
    """How the model computes attention."""
    attention_mask: bool | None = None
    """Whether the batch carries a mask of ones, as tokenizers give; None leaves it to the model's family."""
    lora: LoraPlan | None = None
    """Adapters, if any."""
    freeze: tuple[str, ...] = ()
    """Shell patterns of parameters that get no gradient."""
    load_dtype: str | None = None
    """The type the weights are loaded in, if not float32."""
    client_optimizer: ClientOptimizer | None = None
    """One that the script makes and gives to `deepspeed.initialize`, instead of DeepSpeed's own."""
    alloc_conf: str | None = None
    """`PYTORCH_ALLOC_CONF` of the training process."""
    zero_init: bool = False
    """Whether the model is built under `deepspeed.zero.Init`."""
    ds_config: dict[str, Any] | None = None
    """A whole ds_config that replaces what the other fields would make."""

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that train on sequences of their own."""
        return self.world_size // self.sequence_parallel_size

    @property
    def global_batch(self) -> int:
        """Sequences a step, over all ranks."""
        return self.micro_batch * self.gradient_accumulation_steps * self.data_parallel_size

    def digest(self) -> str:
        """Twelve hexadecimal digits that name this plan."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
