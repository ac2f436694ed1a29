"""A pytest plugin that prints one line for every row of docs/SPEC.md: which tests prove it, and whether they passed.

    python -m pytest -p scripts.spec_report

A row has *failed* if any of its tests failed or did not run to its end, *passed* if at least one passed and none
failed, and is *untested* otherwise: a skipped test proves nothing. A mark that names no row is said and
fails the run, so that no proof is misfiled.

The rows a test proves travel in its report's `user_properties`, which is all that crosses from a pytest-xdist worker.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parent.parent / "docs" / "SPEC.md"
ROW = re.compile(r"^\| ([A-Z]{3}-\d{2})[+*]? \|", re.MULTILINE)
PROPERTY = "spec"


def row_ids(text: str) -> list[str]:
    return ROW.findall(text)


class SpecReport:
    """Collects outcomes while the tests run and prints the rows when everything else has been printed."""

    def __init__(self, rows: list[str]) -> None:
        self._rows = rows
        # A worker that crashes reports its test without properties; they are known from the report of its setup.
        self._rows_of: dict[str, list[str]] = {}
        self._outcomes: dict[str, dict[str, set[str]]] = {row: {} for row in rows}
        self._misfiled: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ids = [str(arg) for mark in item.iter_markers("spec") for arg in mark.args]
            item.user_properties += [(PROPERTY, row) for row in dict.fromkeys(ids)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows = [str(value) for name, value in report.user_properties if name == PROPERTY]
        rows = self._rows_of.setdefault(report.nodeid, rows)
        # Setup and teardown count only when they fail: passing them is no proof.
        if report.when in {"setup", "teardown"} and report.passed:
            return
        test = report.nodeid.partition("[")[0]
        for row in rows:
            if row in self._outcomes:
                self._outcomes[row].setdefault(test, set()).add(report.outcome)
            else:
                self._misfiled[test] = row

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._misfiled and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if hasattr(config, "workerinput"):
            return  # inside a worker: the controller prints
        writer = config.get_terminal_writer()
        writer.line()
        for line in self.lines():
            writer.line(line)

    def lines(self) -> Iterable[str]:
        for test, row in sorted(self._misfiled.items()):
            yield f"{test} is marked {row}, and docs/SPEC.md has no such row"
        passed = 0
        for row in self._rows:
            outcomes = self._outcomes[row]
            verdict = judge(outcomes.values())
            passed += verdict == "passed"
            yield " ".join([row, verdict, *(named(test, seen) for test, seen in sorted(outcomes.items()))])
        yield f"{passed} of {len(self._rows)} rows passed"


def judge(outcomes: Iterable[set[str]]) -> str:
    seen = set().union(*outcomes)
    return next((verdict for verdict in ("failed", "passed") if verdict in seen), "untested")


def named(test: str, seen: set[str]) -> str:
    """The test's id, with anything but a plain pass said beside it."""
    odd = sorted(seen - {"passed"})
    return f"{test}({','.join(odd)})" if odd else test


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SpecReport(row_ids(SPEC.read_text(encoding="utf-8"))), "taskyard-spec-report")
