"""The shared words, one for each concept. This module imports nothing heavy: the command line needs it at once."""

from enum import StrEnum


class Offload(StrEnum):
    """What ZeRO-Offload keeps on the host."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """Optimizer states and their update (ZeRO 1, 2 and 3)."""
    OPTIMIZER_PARAM = "optimizer+param"
    """Optimizer states and parameters (ZeRO 3 only)."""


class Precision(StrEnum):
    """What DeepSpeed trains in."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Checkpointing(StrEnum):
    """Activation checkpointing: recompute the forward of each layer in the backward."""

    OFF = "off"
    ON = "on"
    """Non-reentrant, what torch and transformers recommend."""
    REENTRANT = "reentrant"
    """The older autograd-function form."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's own, with what `activation_checkpointing` of the ds_config says (partitioned, on the CPU)."""


class ClientOptimizer(StrEnum):
    """An optimizer that the training script makes and hands to `deepspeed.initialize`."""

    ADAM = "adam"
    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    """With momentum."""
    ADAM_8BIT = "adam8bit"
    ADAMW_8BIT = "adamw8bit"

    @property
    def is_tested(self) -> bool:
        """Whether ZeRO takes it without `zero_allow_untested_optimizer`.

        Source: deepspeed 0.19.8 `runtime/zero/utils.py`, ZERO_SUPPORTED_OPTIMIZERS.
        """
        return self in {ClientOptimizer.ADAM, ClientOptimizer.ADAMW}


DEFAULT_OPTIMIZER = "AdamW"
"""DeepSpeed makes it, unless another is asked for."""
CLIENT_OPTIMIZERS = {
    "torch.Adam": ClientOptimizer.ADAM,
    "torch.AdamW": ClientOptimizer.ADAMW,
    "torch.Adafactor": ClientOptimizer.ADAFACTOR,
    "torch.SGD": ClientOptimizer.SGD,
    "bitsandbytes.Adam8bit": ClientOptimizer.ADAM_8BIT,
    "bitsandbytes.AdamW8bit": ClientOptimizer.ADAMW_8BIT,
}
"""What users call them."""


class Attention(StrEnum):
    """How the model computes attention."""

    SDPA = "sdpa"
    """torch's `scaled_dot_product_attention`, which chooses a kernel; where a model has none, as `eager`."""
    EAGER = "eager"
    """Matrix products and a softmax."""
    FLASH = "flash"
    """FlashAttention-2, as torch brings it, wherever it takes a call."""
    EFFICIENT = "efficient"
    """The memory-efficient kernel (xformers'), as torch brings it, wherever it takes a call."""


class Routing(StrEnum):
    """Where the tokens of a mixture of experts go, since no router is trained here."""

    BALANCED = "balanced"
    """Every expert gets the same number of tokens."""
    WORST = "worst"
    """Every token goes to the first experts: what a router of zeros does, and the upper bound."""


class Verdict(StrEnum):
    """Whether a plan has room."""

    FITS = "fits"
    """Even at the upper end of its range."""
    TIGHT = "tight"
    """Between the ends: some runs will run out of memory."""
    OVER = "over"
    """Not even at the lower end."""


STAGES = (0, 1, 2, 3)


def allowed_offloads(stage: int) -> tuple[Offload, ...]:
    """The offloads that have an effect at a ZeRO stage.

    Source: deepspeed 0.19.8 `runtime/zero/offload_config.py` (documented "valid with stage 1, 2, 3" for the
    optimizer and "only with stage 3" for parameters).
    """
    if stage == 0:
        return (Offload.NONE,)
    if stage in {1, 2}:
        return (Offload.NONE, Offload.OPTIMIZER)
    return (Offload.NONE, Offload.OPTIMIZER, Offload.OPTIMIZER_PARAM)
