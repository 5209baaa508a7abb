"""`dstune lint`."""

import json as jsonlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dstune.atomicfile import write_whole
from dstune.cli import options
from dstune.cli.fit import Fit, read_surroundings
from dstune.errors import ConfigFileError, ExitCode, UsageError
from dstune.lint.document import Document, read_document
from dstune.lint.finding import Finding
from dstune.lint.inspection import DEEPSPEED, DOES_NOT_FIT, EXTRA_RULES, Selection, inspect, report_extra
from dstune.lint.mend import mend
from dstune.lint.rule import Deed, Severity, Surroundings
from dstune.lint.rules import RULES
from dstune.lint.settings import Settings, read_settings
from dstune.lint.validation import refusals
from dstune.report import lintings
from dstune.report.lintings import Format
from dstune.report.text import console

RULES_PANEL = "Rules"
Files = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE...", help="ds_config files, as JSON or with comments.")
]
FormatWord = Annotated[
    Format | None,
    typer.Option("--format", help="Default: text, or github in a GitHub workflow.", rich_help_panel=options.OUTPUT),
]


def lint(
    files: Files = None,
    select: Annotated[
        str | None, typer.Option(metavar="RULES", help="Only these, or beginnings.", rich_help_panel=RULES_PANEL)
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(metavar="RULES", help="Not these, or beginnings.", rich_help_panel=RULES_PANEL)
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List all rules.", rich_help_panel=RULES_PANEL)] = False,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Findings to accept.", rich_help_panel=RULES_PANEL)
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Accept all that is found now.", rich_help_panel=RULES_PANEL)
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what is safe, in place.", rich_help_panel=RULES_PANEL)
    ] = False,
    deepspeed: Annotated[
        bool,
        typer.Option("--deepspeed/--no-deepspeed", help="Run DeepSpeed's own parser too.", rich_help_panel=RULES_PANEL),
    ] = True,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Read no pyproject.toml.", rich_help_panel=RULES_PANEL)
    ] = False,
    world_size: Annotated[
        int | None, typer.Option(help="Data-parallel ranks.", rich_help_panel=options.HARDWARE)
    ] = None,
    gpu: options.GpuWord = None,
    gpus: options.Gpus = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Say whether it fits, with --gpu.", rich_help_panel=options.MODEL),
    ] = None,
    seq_len: options.SeqLen = None,
    format_: FormatWord = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 whatever is found.", rich_help_panel=options.OUTPUT)
    ] = False,
    json: options.Json = False,
) -> ExitCode:
    """Find what is wrong in a ds_config: errors, keys without effect, batch sizes that do not multiply.

    dstune lint ds_config.json --world-size 8

    dstune lint configs/*.json --fix

    dstune lint ds_config.json --model llama-3-8b --gpu a100-80gb --gpus 8
    """
    if rules:
        return _list_rules()
    options.at_least_one(world_size, "--world-size")
    settings = Settings() if isolated else read_settings(Path.cwd())
    chosen = Format.JSON if json else format_ or _default_format()
    kept = baseline or (Path(settings.baseline) if settings.baseline else None)
    if write_baseline and kept is None:
        raise UsageError("--write-baseline needs a file", hint="pass --baseline dstune-baseline.json")
    selection = Selection(
        _names(select) or settings.select,
        _names(ignore) or settings.ignore,
        frozenset() if write_baseline or kept is None else _read_baseline(kept),
    )
    selection.check()
    around, fit = read_surroundings(model, gpu, gpus, seq_len, world_size or settings.world_size)
    documents = _read(files)
    num_fixed = 0
    if fix:
        documents, num_fixed = _mend(documents, around, selection)
    findings = _inspect(documents, around, selection, fit, ask_deepspeed=deepspeed)
    if write_baseline and kept is not None:
        accepted = sorted({one.fingerprint for one in findings})
        write_whole(kept, jsonlib.dumps({"accepted": accepted}, indent=2) + "\n")
        console(stderr=True).print(f"{len(accepted)} findings are accepted from now on: {kept}")
        return ExitCode.OK
    code = _exit_code(findings, chosen, exit_zero=exit_zero)
    _print(findings, len(documents), num_fixed, chosen, code)
    return code


def _read(files: list[Path] | None) -> list[Document]:
    if not files:
        raise UsageError("no file is given", hint="dstune lint ds_config.json")
    return [read_document(path) for path in dict.fromkeys(files)]


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _default_format() -> Format:
    return Format.GITHUB if os.environ.get("GITHUB_ACTIONS") == "true" else Format.TEXT


def _read_baseline(path: Path) -> frozenset[str]:
    try:
        accepted = jsonlib.loads(path.read_text(encoding="utf-8"))["accepted"]
        return frozenset(str(one) for one in accepted)
    except FileNotFoundError as error:
        raise ConfigFileError(f"the baseline `{path}` is not there", hint="make it with --write-baseline") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "make it anew with --write-baseline"
        raise ConfigFileError(f"{path}:1: no baseline of dstune", hint=hint, because=(str(error),)) from error


def _mend(documents: list[Document], around: Surroundings, selection: Selection) -> tuple[list[Document], int]:
    """Fix each file; only those that change are written."""
    made, num_fixed = [], 0
    for document in documents:
        mended, gone = mend(document, around, selection)
        if gone:
            write_whole(Path(document.name), mended.text)
        made.append(mended)
        num_fixed += len(gone)
    return made, num_fixed


def _inspect(
    documents: Sequence[Document],
    around: Surroundings,
    selection: Selection,
    fit: Fit | None,
    *,
    ask_deepspeed: bool,
) -> list[Finding]:
    found = {number: inspect(document, around, selection) for number, document in enumerate(documents)}
    clean = [number for number in found if not any(_is_refused(one) for one in found[number])]
    clean = [number for number in clean if documents[number].fault is None]
    if ask_deepspeed and clean and selection.takes(DEEPSPEED):
        for number, problem in zip(clean, refusals([documents[number] for number in clean]), strict=True):
            if problem is not None:
                found[number] += report_extra(DEEPSPEED, [problem], documents[number], selection)
    if fit is not None and selection.takes(DOES_NOT_FIT):
        for number in clean:
            if not any(one.severity is Severity.ERROR for one in found[number]):
                problems = fit.problems(documents[number])
                found[number] += report_extra(DOES_NOT_FIT, problems, documents[number], selection)
    return [one for number in sorted(found) for one in found[number]]


def _is_refused(finding: Finding) -> bool:
    """Whether a rule has already said what DeepSpeed's parser would say."""
    return finding.severity is Severity.ERROR and RULES[finding.rule].deed is Deed.REFUSES


def _exit_code(findings: Sequence[Finding], chosen: Format, *, exit_zero: bool) -> ExitCode:
    """Notes are no reason to fail; readers of SARIF judge for themselves."""
    bad = any(one.severity is not Severity.NOTE for one in findings)
    return ExitCode.NEGATIVE if bad and not exit_zero and chosen is not Format.SARIF else ExitCode.OK


def _print(findings: list[Finding], num_files: int, num_fixed: int, chosen: Format, code: ExitCode) -> None:
    made = ""
    match chosen:
        case Format.TEXT:
            made = lintings.as_text(findings, num_files, num_fixed)
        case Format.JSON:
            made = lintings.as_json(findings, num_files, num_fixed, code)
        case Format.SARIF:
            made = lintings.as_sarif(findings)
        case Format.MARKDOWN:
            made = lintings.as_markdown(findings, num_files)
        case Format.GITHUB:
            made = lintings.as_github(findings)
            _write_job_summary(lintings.as_markdown(findings, num_files))
            console(stderr=True).print(lintings.summary(findings, num_files, num_fixed), soft_wrap=True)
    if made:
        sys.stdout.write(made + "\n")


def _write_job_summary(markdown: str) -> None:
    """Where GitHub shows it on the run's page."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(markdown)
        except OSError as error:
            console(stderr=True).print(f"warning: the job summary cannot be written: {error}", soft_wrap=True)


def _list_rules() -> ExitCode:
    for rule in RULES.values():
        fixable = " (--fix)" if rule.is_fixable else ""
        sys.stdout.write(f"{rule.id:<40} {rule.severity:<8} {rule.what}{fixable}\n")
    for name in EXTRA_RULES:
        sys.stdout.write(f"{name:<40} {'error':<8} {EXTRA_RULES[name]}\n")
    return ExitCode.OK
