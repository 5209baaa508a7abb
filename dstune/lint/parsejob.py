"""DeepSpeed's own parser, in a process of its own: configs as a JSON list on stdin, answers as one on stdout.

An answer is null, or the exception: its type, its words, and for pydantic's the model and the keys.
"""

import json
import os
import sys
from typing import Any


def parse(config: dict[str, Any]) -> dict[str, Any] | None:
    """What DeepSpeedConfig raises."""
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415 - heavy
    from pydantic import ValidationError  # noqa: PLC0415 - beside it

    try:
        DeepSpeedConfig(config)
    except ValidationError as error:
        first = error.errors()[0]
        return {"type": error.title, "message": first["msg"], "keys": [str(key) for key in first["loc"]]}
    except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
        return {"type": type(error).__name__, "message": " ".join(str(error).split()), "keys": []}
    return None


def main() -> None:
    """Answer once."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    configs = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints where it likes
    made = json.dumps([parse(config) for config in configs])
    with os.fdopen(answers, "w") as out:
        out.write(made)


if __name__ == "__main__":
    main()
