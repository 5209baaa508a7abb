"""Every error a user can meet: a stable code, an exit status, one message, one hint.

DstuneError
├── UsageError          2  a flag, a value or a file is wrong
│   ├── ConfigFileError 2  a file has a fault at a line
│   └── RefusedConfigError 2  DeepSpeed refuses the ds_config
├── MachineError        3  the machine cannot do it
│   ├── ModelError      3  the model cannot be found or built
│   └── UnsupportedOperationError 3  an operation that the virtual GPU does not model
└── InternalError       4  a bug in dstune
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """The six exit statuses of every command."""

    OK = 0
    """Done, and the answer is yes."""
    NEGATIVE = 1
    """Done, and the answer is no."""
    USAGE = 2
    """Wrong use: a flag, a value or a file."""
    ENVIRONMENT = 3
    """This machine or this model cannot do it."""
    BUG = 4
    """A bug in dstune."""
    INTERRUPTED = 130
    """Ctrl-C."""


class DstuneError(Exception):
    """Base of all errors that are shown to users.

    Args:
        message: One lower-case sentence without a full stop.
        hint: What to do about it, or a command to paste.
        because: Causes, outermost first.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(self, message: str, *, hint: str | None = None, because: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.because = because
        self.trace = ""
        """Traceback of another process, for `--debug`."""


class UsageError(DstuneError):
    """A flag, a value or a file is wrong."""

    code = "usage"
    exit_code = ExitCode.USAGE


class ConfigFileError(UsageError):
    """A file that the user named has a fault; the message begins with `file:line`."""

    code = "config-file"


class RefusedConfigError(UsageError):
    """DeepSpeed itself refuses the configuration."""

    code = "refused-config"


class MachineError(DstuneError):
    """This machine lacks something: a GPU, memory, disk, network."""

    code = "machine"
    exit_code = ExitCode.ENVIRONMENT


class ModelError(MachineError):
    """The model cannot be found, built or run."""

    code = "model"


class UnsupportedOperationError(MachineError):
    """The model does something that the virtual GPU does not model, so no number can be given."""

    code = "unsupported-operation"


class InternalError(DstuneError):
    """A bug in dstune."""

    code = "bug"
    exit_code = ExitCode.BUG


BY_CODE: dict[str, type[DstuneError]] = {
    kind.code: kind
    for kind in (
        UsageError,
        ConfigFileError,
        RefusedConfigError,
        MachineError,
        ModelError,
        UnsupportedOperationError,
        InternalError,
    )
}
"""How an error that crossed a process comes back as the right class."""
