"""Takes readings: each in a fresh process and folder, the sides of a scenario in turn."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reading import Reading

REPOSITORY = Path(__file__).resolve().parent.parent
# Inside the repository, so that databases lie on a real disk: a system's temporary folder may be memory.
SCRATCH = REPOSITORY / ".bench"
READING_TIMEOUT_S = 300.0


class SideFailed(Exception):
    """A side crashed, hung or did not finish its work: its scenario proves nothing until that is repaired."""


@dataclass(frozen=True, slots=True)
class Side:
    """A function that takes a reading, by import path, with its keyword arguments (JSON values)."""

    name: str
    target: str
    arguments: dict[str, object] = field(default_factory=dict)

    def read(self) -> Reading:
        with scratch_folder() as folder:
            return self._read_in(Path(folder))

    def _read_in(self, folder: Path) -> Reading:
        answer = folder / "reading.json"
        command = [sys.executable, "-m", "benchmarks.child", self.target]
        command += [json.dumps(self.arguments), str(folder), str(answer)]
        try:
            done = subprocess.run(
                command, check=False, cwd=REPOSITORY, timeout=READING_TIMEOUT_S, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired as late:
            raise SideFailed(f"{self.name}: no reading within {READING_TIMEOUT_S:.0f} s") from late
        if done.returncode != 0:
            raise SideFailed(f"{self.name}: exit code {done.returncode}\n{done.stderr.strip()}")
        return self._checked(Reading.from_json(json.loads(answer.read_text())))

    def _checked(self, reading: Reading) -> Reading:
        if reading.held != reading.given:
            raise SideFailed(f"{self.name}: its store holds {reading.held:,} of {reading.given:,}, nothing is compared")
        return reading


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    SCRATCH.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=SCRATCH)


def read_in_turn(sides: Sequence[Side], *, rounds: int) -> dict[str, list[Reading]]:
    """A reading of every side in each round; who goes first changes, so that nobody always follows the same side."""
    readings: dict[str, list[Reading]] = {side.name: [] for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            reading = side.read()
            readings[side.name].append(reading)
            print(f"    round {number + 1}  {side.name:32} {reading.value:.6g}", file=sys.stderr, flush=True)
    return readings
