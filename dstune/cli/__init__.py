"""The command line: one boundary where errors become messages and exit statuses. Imports nothing heavy."""

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from dstune import __version__
from dstune.cli.cache import cache
from dstune.cli.catalogues import gpus, models
from dstune.cli.emit import emit_config
from dstune.cli.estimate import estimate
from dstune.cli.lint import lint
from dstune.cli.search import search
from dstune.errors import DstuneError, ExitCode, InternalError, UsageError
from dstune.report.machine import envelope, error_entry
from dstune.report.text import console, error_lines

EPILOG = (
    "Exit status: 0 yes, 1 no (nothing fits), 2 wrong use, 3 this machine or model cannot do it, "
    "4 a bug in dstune, 130 interrupted."
)

app = typer.Typer(
    name="dstune",
    help="Which DeepSpeed settings fit: the real training step, run on a virtual GPU.",
    no_args_is_help=True,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DSTUNE"},
)
app.command(epilog=EPILOG)(estimate)
app.command(epilog=EPILOG)(search)
app.command("emit-config", epilog=EPILOG)(emit_config)
app.command(epilog=EPILOG)(lint)
app.command()(models)
app.command()(gpus)
app.command()(cache)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dstune {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    del version
    if debug:
        os.environ["DSTUNE_DEBUG"] = "1"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; every outcome has an exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if "--debug" in words:  # it may stand anywhere
        words = ["--debug", *(word for word in words if word != "--debug")]
    as_json = "--json" in words
    command = next((word for word in words if not word.startswith("-")), "dstune")
    try:
        code = app(args=words, prog_name="dstune", standalone_mode=False)
    except DstuneError as error:
        return _fail(error, command, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\nerror: interrupted\n")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader went away, as `| head` does
        return ExitCode.OK
    except Exception as error:  # noqa: BLE001 - the boundary
        return _unexpected(error, command, as_json=as_json)
    return int(code) if isinstance(code, int) else ExitCode.OK


def _unexpected(error: Exception, command: str, *, as_json: bool) -> int:
    """A wrong use found by typer, which has no public class for it but a message; or a bug."""
    message: Any = getattr(error, "format_message", None)
    if message is not None:
        text = str(message()).rstrip(".")
        return _fail(
            UsageError(text[:1].lower() + text[1:], hint=f"see dstune {command} --help"), command, as_json=as_json
        )
    bug = InternalError(
        f"unexpected {type(error).__name__}: {error}", hint="this is a bug in dstune: report it with --debug's output"
    )
    bug.trace = traceback.format_exc()
    return _fail(bug, command, as_json=as_json)


def _fail(error: DstuneError, command: str, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(envelope(command, error.exit_code, errors=(error_entry(error),)) + "\n")
    err = console(stderr=True)
    if os.environ.get("DSTUNE_DEBUG"):
        sys.stderr.write(error.trace or traceback.format_exc())
    for line in error_lines(error):
        err.print(line)
    return error.exit_code
