"""The table, for the terminal and for `docs/BENCHMARKS.md`."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import apsw

from benchmarks.finding import Finding

HEADINGS = ["scenario", "ours", "peer or limit", "ratio (lowest … highest)", "bar", "met"]
SHOWN_VERSIONS = ["taskyard", "uvloop", "apsw", "asyncpg", "huey", "saq", "taskiq", "pgqueuer", "procrastinate"]
SHOWN_VERSIONS += ["pebble", "loky", "anyio", "numpy", "adbutils"]

PREFACE = """\
# Benchmarks

Written by `make bench ARGS="--write docs/BENCHMARKS.md"`; do not edit.

Every reading is taken in a fresh process. The sides of a scenario take turns, round after round; the columns show
medians, and the ratio is the median of the ratios within each round, with the lowest and the highest of them. A
reading counts only if the side's store, read after the run, holds all that it was given. Peers run with the setting
that is fastest for them at the same promise; a limit is the least code that does the same work. Rows without a bar
are there to inform. Each section is of the last run of its scenario; `make bench ARGS="calls --write …"` replaces one.
"""


def as_table(findings: Sequence[Finding]) -> str:
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(finding.cells() for finding in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    fill = "-" if row[0] == "---" else " "
    return "| " + " | ".join(cell.ljust(width, fill) for cell, width in zip(row, widths, strict=True)) + " |"


def as_section(findings: Sequence[Finding], failures: Sequence[str], *, quick: bool) -> str:
    """What a scenario has to say, under its heading."""
    parts = [_machine(quick), "", as_table(findings), ""] if findings else []
    parts += [f"Failed: {failure.splitlines()[0]}\n" for failure in failures]
    return "\n".join(parts)


def as_document(earlier: str, sections: Mapping[str, str], order: Sequence[str]) -> str:
    """The document with these sections; those that are not among them stay as they were `earlier`."""
    kept = {name.strip(): body.strip("\n") for name, body in _sections(earlier)}
    kept |= {name: body.strip("\n") for name, body in sections.items()}
    known = [name for name in order if name in kept]
    return "\n".join([PREFACE, *(f"## {name}\n\n{kept[name]}\n" for name in known)])


def _sections(document: str) -> Iterator[tuple[str, str]]:
    for part in document.split("\n## ")[1:]:
        name, _, body = part.partition("\n")
        yield name, body


def _machine(quick: bool) -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in SHOWN_VERSIONS)
    kind = "A quick run" if quick else "A full run"
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return (
        f"{kind} on {datetime.now(UTC):%Y-%m-%d}: {_processor()}, {os.cpu_count()} cores, {system}, "
        f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}, {versions}."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
