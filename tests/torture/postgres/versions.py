"""The suite of the store against another version of the server, at an address with a password."""

import os
import re
import subprocess
import sys
from pathlib import Path

from taskyard.testing.postgres import ELSEWHERE, FAST, Databases, Server
from tests.torture.figures import Figures

TOP = Path(__file__).parents[3]

SUITE = ("tests/contract/test_stores.py", "tests/stateful", "tests/stores", "tests/scenario/test_transactions.py")

OTHER = 16


def run(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    """All that the suite has on PostgreSQL, `trials` times; the server in use elsewhere is left alone."""
    del where, seed, databases
    figures = Figures(f"PostgreSQL {OTHER}: the suite of the store", 0)
    server = Server(version=OTHER, settings=FAST)
    try:
        server.start()
        for _ in range(trials):
            passed, failures = run_suite(server.url, *SUITE, "-k", "ostgres")
            figures.trials += passed + len(failures)
            figures.failures += failures
    finally:
        server.stop()
    return figures


def run_suite(url: str, *arguments: str) -> tuple[int, list[str]]:
    """How many tests passed on the server at `url`, and which did not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = os.environ | {ELSEWHERE: url}
    said = subprocess.run(command, cwd=TOP, env=env, check=False, capture_output=True, text=True).stdout
    passed = re.search(r"(\d+) passed", said)
    failures = re.findall(r"^(?:FAILED|ERROR) .*", said, re.MULTILINE)
    return (int(passed[1]) if passed else 0), failures if passed or failures else [said[-2000:]]
