"""What the log says of runs, as somebody reads it who looks for the reason of a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import Any

import pytest

from taskyard import Cancel, RetryLater, RetryPolicy, Yard
from taskyard.errors import TaskEnded
from taskyard.telemetry.logs import RunLog
from tests.scenario.crashing import die

AGAIN = RetryPolicy(max_retries=1, first_s=0.01, jitter=0)
ONCE = RetryPolicy(max_retries=0)


@pytest.fixture
def yard() -> Yard:
    """One that also logs what goes well."""
    return Yard("memory://", sinks=[RunLog()])


def about(caplog: pytest.LogCaptureFixture, uuid: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "request_id", None) == uuid]


async def run_to_the_end(yard: Yard, name: str, caplog: pytest.LogCaptureFixture, **options: Any) -> list[Any]:
    """The log records of one task."""
    caplog.set_level(logging.INFO, "taskyard")
    async with yard:
        handle = await yard.submit(name, **options)
        with contextlib.suppress(TaskEnded):
            await handle.result(timeout_s=20)
    return about(caplog, handle.uuid)


@pytest.mark.spec("EXE-12")
async def test_a_good_run_has_two_lines(yard, caplog):
    """A run that completes is logged at INFO when it starts and when it completes, and its fields are attributes."""

    @yard.consumer
    async def add() -> int:
        return 1

    started, completed = await run_to_the_end(yard, "add", caplog)
    uuid = started.request_id
    assert (started.levelno, started.getMessage()) == (logging.INFO, f"task {uuid} from add started")
    assert (completed.levelno, completed.getMessage()) == (logging.INFO, f"task {uuid} from add completed")
    assert (started.status, completed.status) == ("started", "completed")
    assert (started.consumer, started.queue, started.attempt, started.task) == ("add", "default", 1, uuid)
    assert re.fullmatch("[0-9a-f]{32}", completed.trace_id)
    assert 0 <= completed.duration_ms < 20_000
    assert not hasattr(completed, "error_type")


async def test_each_attempt_is_logged_once(yard, caplog):
    """A failure has one line, with class and message, which attempt it was, what follows, and its traceback. Only the
    last one is marked as a failure of the task."""

    @yard.consumer(retry=AGAIN)
    async def flaky() -> None:
        raise ConnectionError("no route")

    lines = await run_to_the_end(yard, "flaky", caplog)
    failures = [line for line in lines if line.levelno >= logging.WARNING]
    uuid = lines[0].request_id
    assert [line.getMessage() for line in failures] == [
        f"task {uuid} from flaky failed: ConnectionError: no route (attempt 1 of 2, retrying in 10 ms)",
        f"[fail] task {uuid} from flaky: ConnectionError: no route (attempt 2 of 2, final)",
    ]
    assert [line.levelno for line in failures] == [logging.WARNING, logging.ERROR]
    assert [(line.status, line.error_type) for line in failures] == [
        ("retrying", "ConnectionError"),
        ("failed", "ConnectionError"),
    ]
    assert all('raise ConnectionError("no route")' in logging.Formatter().format(line) for line in failures)
    assert [line.status for line in lines] == ["started", "retrying", "started", "failed"]


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_a_failure_reads_the_same_in_every_place(yard, caplog, executor):
    """An exception in a thread or in a worker process is logged once, with its traceback."""
    yard.consumer(name="parse", executor=executor, retry=ONCE)(int_of_letters)
    *_, failed = await run_to_the_end(yard, "parse", caplog)
    told = "ValueError: invalid literal for int() with base 10: 'x' (attempt 1 of 1, final)"
    assert failed.getMessage() == f"[fail] task {failed.request_id} from parse: {told}"
    assert 'int("x")' in logging.Formatter().format(failed)
    assert (executor == "process") is hasattr(failed, "worker_pid")


def int_of_letters() -> int:
    return int("x")


async def test_a_crash_is_logged_as_well_as_an_exception(yard, caplog):
    """A worker process that dies is one line that says how it ended, without a traceback of ours."""
    yard.consumer(executor="process", retry=ONCE)(die)
    *_, failed = await run_to_the_end(yard, "die", caplog)
    assert re.search(r"from die: .*(SIGKILL|signal 9).*\(attempt 1 of 1, final\)$", failed.getMessage())
    assert (failed.error_type, failed.exc_info) == ("system", None)
    assert failed.worker_pid > 0


async def test_a_timeout_is_logged_as_well_as_an_exception(yard, caplog):
    """A run past its timeout is one line that names the timeout."""

    @yard.consumer(timeout_s=0.01, retry=ONCE)
    async def slow() -> None:
        await asyncio.Event().wait()

    *_, failed = await run_to_the_end(yard, "slow", caplog)
    assert failed.getMessage().endswith("from slow: it ran longer than its timeout of 0.01 s (attempt 1 of 1, final)")
    assert failed.error_type == "TimeoutError"


async def test_a_cancel_is_no_failure(yard, caplog):
    """Code that cancels its task is logged at INFO with its reason, and nothing is logged as a failure."""

    @yard.consumer
    async def choosy() -> None:
        raise Cancel("not needed")

    started, canceled = await run_to_the_end(yard, "choosy", caplog)
    assert (canceled.levelno, canceled.status) == (logging.INFO, "canceled")
    assert canceled.getMessage() == f"task {started.request_id} from choosy canceled: not needed"


async def test_a_postponed_run_is_no_failure(yard, caplog):
    """A run that asks for another try later is logged at INFO."""
    calls = []

    @yard.consumer
    async def patient() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RetryLater(0.01, "not there yet")

    lines = await run_to_the_end(yard, "patient", caplog)
    assert [(line.status, line.levelno) for line in lines] == [
        ("started", logging.INFO),
        ("postponed", logging.INFO),
        ("started", logging.INFO),
        ("completed", logging.INFO),
    ]
    assert lines[1].getMessage().endswith("postponed: not there yet")
    assert lines[2].getMessage().endswith("started: attempt 2")


async def test_a_default_yard_logs_failures_only(caplog):
    """Without a sink for them, runs that go well are not logged."""
    yard = Yard("memory://")

    @yard.consumer
    async def add() -> int:
        return 1

    assert await run_to_the_end(yard, "add", caplog) == []
