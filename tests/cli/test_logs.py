"""The log of a worker, line by line."""

import io
import logging
import re
from collections.abc import Callable
from functools import partial

import pytest
from rich.console import Console

from taskyard.cli.logs import LineHandler
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.model.task import Claim
from taskyard.ports.sink import RunFailed
from taskyard.telemetry import FailureLog
from taskyard.testing.samples import NOON, a_record

Printed = Callable[[Callable[[], object]], str]


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def printed(request: pytest.FixtureRequest) -> Printed:
    """What is printed of what is logged, without colours."""

    def run(act: Callable[[], object]) -> str:
        file = io.StringIO()
        handler, log = (
            LineHandler(Console(file=file, force_terminal=request.param, width=80)),
            logging.getLogger("taskyard"),
        )
        log.addHandler(handler)
        try:
            act()
        finally:
            log.removeHandler(handler)
        return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())

    return run


def fail(message: str, args: str = "{}") -> None:
    record = a_record(consumer="fetch", args=args)
    error = ExecutionError(kind=ErrorKind.RUNTIME, message=message, types=("OSError",), traceback="Traceback")
    raised = OSError(message)
    FailureLog().tell(RunFailed(Claim(record, 1, 1), None, Move.failed(at=NOON, error=error), None, raised, 1))


def test_a_failure_is_one_line(printed: Printed) -> None:
    """A failed task is one line that begins with that: the first line of its error, without its traceback."""
    text = printed(lambda: fail("no route\nto host"))
    assert re.fullmatch(
        r"[\d:.]+  failed    fetch [-0-9a-f]{36}  after \S+ ms · attempt 1 of 1, final · OSError: no route …\n", text
    )


def test_a_secret_at_the_end_of_a_long_line_stays_hidden(printed: Printed) -> None:
    """A line is cut after its secrets were hidden: a cut through a secret would show a part of it."""
    for length in range(180, 260, 10):
        text = printed(partial(fail, "x" * length + " hunter22", '{"password":"hunter22"}'))
        assert "hunt" not in text


def test_a_fault_of_ours_has_its_traceback(printed: Printed) -> None:
    """An error that no task raised is printed with its level and its traceback."""
    error = ZeroDivisionError("a bug")
    text = printed(lambda: logging.getLogger("taskyard").error("the %s loop failed", "due", exc_info=error))
    assert re.match(r"[\d:.]+  error  the due loop failed\nZeroDivisionError: a bug\n", text)
