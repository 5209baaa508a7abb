"""`dstune models` and `dstune gpus`: what is built in."""

import sys

from dstune.cli import options
from dstune.cluster.catalogue import catalogue
from dstune.errors import ExitCode
from dstune.model.presets import presets
from dstune.report.machine import envelope
from dstune.report.text import console, gpus_table, models_table


def models(json: options.Json = False) -> ExitCode:
    """List the built-in models."""
    if json:
        rows = [
            {"name": one.name, "class": one.class_name, "source": one.source, "config": one.config}
            for one in presets().values()
        ]
        sys.stdout.write(envelope("models", ExitCode.OK, {"models": rows}) + "\n")
    else:
        console().print(models_table(list(presets().values())))
    return ExitCode.OK


def gpus(json: options.Json = False) -> ExitCode:
    """List the known GPUs."""
    if json:
        rows = [gpu.model_dump(mode="json") for gpu in catalogue().values()]
        sys.stdout.write(envelope("gpus", ExitCode.OK, {"gpus": rows}) + "\n")
    else:
        console().print(gpus_table(list(catalogue().values())))
    return ExitCode.OK
