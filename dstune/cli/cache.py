"""`dstune cache`."""

import sys
from typing import Annotated

import typer

from dstune.cli import options
from dstune.errors import ExitCode, MachineError
from dstune.estimator.resultcache import ResultCache
from dstune.report.machine import envelope
from dstune.report.text import console
from dstune.units import MIB


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete every kept estimate.")] = False,
    json: options.Json = False,
) -> ExitCode:
    """Show or clear the estimates kept from earlier calls.

    dstune cache

    dstune cache --clear
    """
    kept = ResultCache()
    try:
        num_deleted = kept.clear() if clear else 0
        sizes = [path.stat().st_size for path in kept.entries()]
    except OSError as error:
        raise MachineError(
            f"`{kept.folder}` cannot be read or written",
            hint="set DSTUNE_CACHE_DIR to a folder of yours",
            because=(str(error),),
        ) from error
    if json:
        data = {
            "folder": str(kept.folder),
            "num_entries": len(sizes),
            "size_bytes": sum(sizes),
            "num_deleted": num_deleted,
        }
        sys.stdout.write(envelope("cache", ExitCode.OK, data) + "\n")
        return ExitCode.OK
    out = console()
    if clear:
        out.print(f"{num_deleted} estimates deleted")
    out.print(f"{len(sizes)} estimates, {sum(sizes) / MIB:.1f} MiB in {kept.folder}", soft_wrap=True)
    return ExitCode.OK
