"""A JSON file that the user named: read, or refused with the place of the fault."""

import json
from pathlib import Path
from typing import Any

from dstune.errors import ConfigFileError


def read_json(file: Path, missing_hint: str) -> Any:
    """The content of a file.

    Raises:
        ConfigFileError: It is missing, unreadable or no JSON; the message begins with the place.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigFileError(f"`{file}` does not exist", hint=missing_hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"`{file}` cannot be read", because=(str(error),)) from error
    except json.JSONDecodeError as error:
        message = f"{file}:{error.lineno}:{error.colno}: {error.msg[0].lower()}{error.msg[1:]}"
        raise ConfigFileError(message, hint="mend the JSON at that place") from error
    except RecursionError:
        raise ConfigFileError(f"{file}:1: nested too deeply to be a configuration") from None
