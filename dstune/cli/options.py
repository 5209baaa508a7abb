"""Option types that commands share, in help panels; and lists written with commas."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from dstune.errors import UsageError

MODEL, HARDWARE, TRAINING, OUTPUT = "Model", "Hardware", "Training", "Output"

T = TypeVar("T")

ModelWord = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (`dstune models`), a folder or file with a config.json, a hub id `org/name`, "
        "or `package.module:function`.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that comes with the model.", rich_help_panel=MODEL)
]
Lora = Annotated[
    str | None,
    typer.Option("--lora", metavar="r=N,targets=A:B", help="Train low-rank adapters only.", rich_help_panel=MODEL),
]
Freeze = Annotated[
    str | None,
    typer.Option(
        "--freeze", metavar="PATTERNS", help="Parameters without gradients: *embed*,*.0.*", rich_help_panel=MODEL
    ),
]
GpuWord = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME|SIZE",
        help="a100-80gb, h100 ..., or 24GiB. Default: the one here.",
        rich_help_panel=HARDWARE,
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", help="GPUs a node. Default: those here, or 1.", rich_help_panel=HARDWARE)
]
Nodes = Annotated[int, typer.Option("--nodes", help="Nodes.", rich_help_panel=HARDWARE)]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Memory of a node. Default: this one's, if its GPU is meant.",
        rich_help_panel=HARDWARE,
    ),
]
Zero = Annotated[
    str, typer.Option("--zero", metavar="STAGES", help="ZeRO stages, such as 2,3.", rich_help_panel=TRAINING)
]
OffloadWords = Annotated[
    str,
    typer.Option(
        "--offload", metavar="LIST", help="none, optimizer, optimizer+param, or all.", rich_help_panel=TRAINING
    ),
]
PrecisionWords = Annotated[
    str,
    typer.Option("--precision", metavar="LIST", help="fp16, bf16, fp32, or all.", rich_help_panel=TRAINING),
]
CheckpointingWord = Annotated[
    str,
    typer.Option(
        "--checkpointing",
        metavar="on|off|both|reentrant|deepspeed",
        help="Activation checkpointing.",
        rich_help_panel=TRAINING,
    ),
]
MicroBatch = Annotated[
    str | None,
    typer.Option(
        "--micro-batch",
        metavar="N|max",
        help="Sequences a GPU a micro-step, or the largest that fits. Default: 1.",
        rich_help_panel=TRAINING,
    ),
]
Accumulation = Annotated[
    int | None, typer.Option("--accumulation", help="Micro-steps a step. Default: 1.", rich_help_panel=TRAINING)
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len", help="Tokens a sequence. Default: 1024, or what the model takes.", rich_help_panel=TRAINING
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="DeepSpeed's optimizer type, or the script's own: torch.AdamW, bitsandbytes.AdamW8bit, ...",
        rich_help_panel=TRAINING,
    ),
]
SequenceParallel = Annotated[
    int,
    typer.Option(
        "--sequence-parallel",
        metavar="N",
        help="GPUs that share each sequence (Ulysses).",
        rich_help_panel=TRAINING,
    ),
]
ZeroInit = Annotated[
    bool,
    typer.Option(
        "--zero-init/--no-zero-init",
        help="ZeRO 3: build the model under deepspeed.zero.Init, as Hugging Face's Trainer does.",
        rich_help_panel=TRAINING,
    ),
]
AttentionWord = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="sdpa|eager|flash|efficient",
        help="How attention is computed.",
        rich_help_panel=TRAINING,
    ),
]
AllocConf = Annotated[
    str | None,
    typer.Option(
        "--alloc-conf",
        metavar="CONF",
        help="PYTORCH_ALLOC_CONF of the training process, such as expandable_segments:True.",
        rich_help_panel=TRAINING,
    ),
]
RoutingWord = Annotated[
    str,
    typer.Option(
        "--routing",
        metavar="balanced|worst",
        help="Mixture of experts: tokens spread evenly, or all to the same experts.",
        rich_help_panel=TRAINING,
    ),
]
DsConfig = Annotated[
    str | None,
    typer.Option(
        "--ds-config",
        metavar="FILE",
        help="Run exactly this ds_config first; other rows vary it.",
        rich_help_panel=TRAINING,
    ),
]
PlanFile = Annotated[
    str | None,
    typer.Option("--plan", metavar="FILE", help="A plan as JSON, and nothing else.", rich_help_panel=TRAINING),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=OUTPUT)]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit 0 even if nothing fits.", rich_help_panel=OUTPUT)]
Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Plans run at once. Default: one a core.", rich_help_panel=OUTPUT)
]
Cache = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Answer from earlier estimates, and keep these.", rich_help_panel=OUTPUT),
]


def listed(text: str, flag: str, read: Callable[[str], T], allowed: tuple[str, ...]) -> list[T]:
    """Read `2,3` or `all`.

    Raises:
        UsageError: A word that is not allowed.
    """
    words = list(allowed) if text.strip() == "all" else [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if word not in allowed]
    if wrong or not words:
        shown = wrong[0] if wrong else text
        raise UsageError(f"`{shown}` is no value of {flag}", hint=f"use {', '.join(allowed)}, with commas, or all")
    return [read(word) for word in dict.fromkeys(words)]


MAX = "max"


def number_or_max(text: str | None, flag: str) -> int | None:
    """Read a number of at least 1; None for `max` or nothing.

    Raises:
        UsageError: It is neither.
    """
    if text is None or text == MAX:
        return None
    if not text.isdecimal():
        raise UsageError(f"`{text}` is no value of {flag}", hint=f"{flag} takes a number of at least 1, or {MAX}")
    at_least_one(int(text), flag)
    return int(text)


def one_of(text: str, flag: str, read: Callable[[str], T], allowed: tuple[str, ...]) -> T:
    """Read a word that may not be a list.

    Raises:
        UsageError: It is not allowed; a list never is.
    """
    if text not in allowed:
        is_list = text == "all" or "," in text
        said = f"{flag} takes one value, not `{text}`" if is_list else f"`{text}` is no value of {flag}"
        raise UsageError(said, hint=f"use one of {', '.join(allowed)}")
    return read(text)


def at_least_one(number: int | None, flag: str) -> None:
    """Refuse nothing and less.

    Raises:
        UsageError: Below 1.
    """
    if number is not None and number < 1:
        raise UsageError(f"{flag} {number} is impossible", hint=f"{flag} must be at least 1")
