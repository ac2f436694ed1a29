"""One reading in a process of its own: `python -m benchmarks.child module:function '{"count": 1}' FOLDER ANSWER`."""

import importlib
import json
import sys
from pathlib import Path

from benchmarks.reading import Reading


def main(target: str, arguments: str, folder: str, answer: str) -> None:
    module, _, function = target.partition(":")
    measure = getattr(importlib.import_module(module), function)
    reading = measure(Path(folder), **json.loads(arguments))
    if not isinstance(reading, Reading):
        raise TypeError(f"{target} returned {reading!r}, not a Reading")
    Path(answer).write_text(json.dumps(reading.to_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
