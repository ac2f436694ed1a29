"""`import taskyard` in a new interpreter, whole process, and what it must not bring along."""

import os
import subprocess
import sys
import time

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import SideFailed

# What speaks to people, to the web and to PostgreSQL is loaded by who uses it.
UNWANTED = {"fastapi", "starlette", "uvicorn", "typer", "click", "rich", "asyncpg", "psycopg"}


def run(settings: Settings) -> list[Finding]:
    modules = ["saq"] if settings.without_ours else ["taskyard", "saq"]
    for module in modules:  # the first import writes bytecode
        _seconds_to_import(module)
    times: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(settings.pick(full=40, quick=15)):
        for module in modules:
            times[module].append(_seconds_to_import(module))
    if not settings.without_ours:
        _refuse_unwanted("taskyard")
    title = "`import taskyard`, whole process"
    return [Finding(title, "saq", Unit.SECONDS, times.get("taskyard", []), times["saq"], BARS["import", "saq"])]


def _seconds_to_import(module: str) -> float:
    began = time.perf_counter()
    _python(f"import {module}")
    return time.perf_counter() - began


def _refuse_unwanted(module: str) -> None:
    loaded = _python(f"import sys, {module}; print(*sys.modules)").split()
    unwanted = UNWANTED & {name.partition(".")[0] for name in loaded}
    if unwanted:
        raise SideFailed(f"import {module} brings along {', '.join(sorted(unwanted))}")


def _python(code: str) -> str:
    # A shell that forbids bytecode would have us measure the compiler.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise SideFailed(f"{code!r}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout
