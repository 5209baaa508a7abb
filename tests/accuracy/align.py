"""Line a predicted tape up with a recorded event list: `python -m tests.accuracy.align FILE.jsonl ROW EVENTS.json.gz`.

Each gap names the operations around it: that is where a real kernel allocates what the table in
`dstune.estimator.scratch` does not know, or in another order.
"""

import argparse
import difflib
import gzip
import json
import sys
from collections import Counter
from pathlib import Path

from dstune.estimator.allocator import round_size
from dstune.estimator.pool import Pool
from dstune.estimator.tape import Kind, Tape
from tests.accuracy.record import job_for, load_rows

Named = list[tuple[str, str]]
"""Events as (`+bytes` or `-bytes`, label)."""


def main() -> int:
    """Print the gaps, those that repeat only once."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.align", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("row")
    parser.add_argument("events", type=Path)
    parser.add_argument("--most", type=int, default=60, help="gaps to print")
    options = parser.parse_args()
    row = next(row for row in load_rows(options.file) if row["name"] == options.row)
    with Pool() as pool:
        [(_, answer, tape)] = pool.run([job_for(row, pool.tape_path())])
    if tape is None:
        print(answer.failure)
        return 1
    recorded, predicted = recorded_events(options.events), predicted_events(tape)
    match = difflib.SequenceMatcher(None, [e for e, _ in recorded], [e for e, _ in predicted], autojunk=False)
    gaps = [code for code in match.get_opcodes() if code[0] != "equal"]
    alike = sum(block.size for block in match.get_matching_blocks())
    print(f"recorded {len(recorded)} events, predicted {len(predicted)}, alike {alike}, gaps {len(gaps)}")
    seen: Counter[tuple[str, ...]] = Counter()
    for _tag, i1, i2, j1, j2 in gaps:
        left, right = _text(recorded[i1:i2]), _text(predicted[j1:j2])
        near = [label for _, label in predicted[max(0, j1 - 1) : j2 + 1]]
        key = (left, right, *(label.split(" ")[0] for label in near))
        seen[key] += 1
        if seen[key] == 1 and len(seen) <= options.most:
            print(f"  at {i1}/{j1}: recorded {left}\n      predicted {right}\n      near {near[:4]}")
    for key, times in seen.most_common(12):
        print(f"{times:5d} x {key}")
    return 0


def recorded_events(path: Path) -> Named:
    """A recorded list without segments."""
    events: Named = []
    live: dict[int, int] = {}
    for action, address, size, _stream, *label in json.loads(gzip.decompress(path.read_bytes())):
        if action == "alloc":
            live[address] = round_size(size)
            events.append((f"+{live[address]}", label[0] if label else ""))
        elif action == "free_completed" and address in live:
            events.append((f"-{live.pop(address)}", ""))
    return events


def predicted_events(tape: Tape) -> Named:
    """The GPU's part of a tape."""
    events: Named = []
    live: dict[int, int] = {}
    for event in tape:
        if event.kind == Kind.ALLOC and event.stream >= 0:
            live[event.block] = round_size(event.size_bytes)
            events.append((f"+{live[event.block]}", tape.labels[event.label]))
        elif event.kind == Kind.FREE and event.block in live:
            events.append((f"-{live.pop(event.block)}", ""))
    return events


def _text(events: Named) -> str:
    shown = " ".join(f"{event} {label.split(' ')[0]}".strip() for event, label in events[:12])
    return shown + (f" ... {len(events)}" if len(events) > 12 else "") or "."


if __name__ == "__main__":
    sys.exit(main())
