"""The log lines of an attempt: what its code logs and prints, on every executor."""

import asyncio
import io
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from taskyard.errors import InvalidInput
from taskyard.execution import line_capture
from taskyard.execution.context import RunContext
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.execution.run_lines import LINES_EVERY_S
from taskyard.model.attempt import LINE_CHARS, LINES_CHARS, LINES_KEPT, LogLine, join_lines
from taskyard.model.notes import Note
from taskyard.model.task import Claim
from taskyard.ports.store import Report
from taskyard.testing.samples import a_record
from tests.execution import misdeeds, writers
from tests.execution.recording import EXECUTORS, INLINE, ISOLATED, PROCESS, THREAD, open_site

EVERY = pytest.mark.parametrize("executor", EXECUTORS)
PROCESSES = pytest.mark.parametrize("executor", [PROCESS, ISOLATED])

ALL_WAYS = [
    ("info", "by the run", "run"),
    ("warning", "by logging", "logging"),
    ("info", "by print", "stdout"),
    ("warning", "by stderr", "stderr"),
]


@pytest.fixture
async def site():
    async with open_site() as site:
        yield site


def shown(lines: list[LogLine]) -> list[tuple[str, str, str]]:
    return [(line.level, line.text, line.origin) for line in lines]


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


# --- ways to write ----------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("function", [writers.write_all, writers.write_all_async], ids=["plain", "async"])
async def test_all_ways_to_write(site, executor, function):
    """What goes to `current_run().log`, `logging`, standard output or standard error becomes lines, in that order."""
    before = datetime.now(UTC)
    lines = await site.lines(function, executor=executor)
    assert shown(lines) == ALL_WAYS
    assert before <= lines[0].at
    assert [line.at for line in lines] == sorted({line.at for line in lines})
    assert lines[-1].at <= datetime.now(UTC)


@EVERY
async def test_handlers_get_each_record_once(site, executor, caplog):
    """Handlers of the host get what is logged in a run once, as before."""
    await site.run(writers.write_all, executor=executor)
    logged = [record.getMessage() for record in caplog.records if record.name in {"app.part", "taskyard.run"}]
    assert logged == ["by logging"]  # the root logger lets warnings through, and `run.log` writes at INFO
    with caplog.at_level(logging.INFO, "taskyard.run"):
        uuid = await site.run(writers.write_all, executor=INLINE)
    [said] = [record.getMessage() for record in caplog.records if record.name == "taskyard.run"]
    assert said == f"by the run [task={uuid} consumer=write_all-inline attempt=1]"


@pytest.mark.parametrize("executor", [INLINE, PROCESS])
async def test_levels(site, executor):
    """The run's own lines are kept at every level, whatever `logging` lets through."""
    lines = await site.lines(writers.write_levels, executor=executor)
    assert [line.level for line in lines] == ["debug", "info", "warning", "error", "critical"]


def test_a_level_that_is_none():
    """A name of a level is refused with what a level is."""
    with pytest.raises(InvalidInput, match=r"level must be a number, such as logging\.WARNING, not 'INFO'"):
        RunContext.log(object(), "text", level="INFO")  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", [THREAD, PROCESS])
async def test_odd_text(site, executor):
    """Unfinished lines, progress bars and characters that no database takes become plain lines."""
    lines = await site.lines(writers.write_oddly, executor=executor)
    assert texts(lines) == ["30%", "a\\0b", "half \\ud800", "%d 'no number'", "the end"]


@pytest.mark.parametrize("executor", [INLINE, PROCESS])
async def test_a_logged_exception(site, executor):
    """A line that is logged with an exception has its traceback."""
    [line] = await site.lines(writers.write_and_raise, executor=executor)
    assert (line.level, line.origin) == ("error", "logging")
    assert line.text.startswith("it went wrong\nTraceback")
    assert line.text.endswith("KeyError: 'inner'")


@EVERY
async def test_a_handler_that_prints(site, executor):
    """A record that a handler writes to standard error is one line, not two."""
    lines = await site.lines(writers.write_through_own_handler, executor=executor)
    assert shown(lines) == [("warning", "once", "logging")]


@EVERY
async def test_filters(site, executor):
    """A filter of a logger decides on lines as well, and a secret that a filter hides in a record, the logger's or a
    handler's, is in no line. A run has a line also if no handler takes the record."""
    lines = await site.lines(writers.write_through_filters, executor=executor)
    assert texts(lines) == ["logger: ***", "handler: ***", "no handler"]


@PROCESSES
async def test_threads_of_a_worker(site, executor):
    """In a worker process, threads that the code starts write lines of the run."""
    assert texts(await site.lines(writers.write_from_a_thread, executor=executor)) == ["from a thread"]


@pytest.fixture
def worker_run():
    """Does a few things as a run in a worker process; the lines of that run."""

    def run_it(*steps):
        reports: list[Report] = []
        run = RunHandle(Claim(a_record(), 1, 1), RunHost(asyncio.get_running_loop(), reports.append))
        line_capture.keep_capturing()
        line_capture.set_worker_run(run)
        for step in steps:
            step()
        run.end()
        line_capture.set_worker_run(None)
        return [line.text for report in reports for line in report.lines]

    line_capture.start_capture()
    yield run_it
    line_capture.stop_capture()


async def test_threads_that_are_left_behind(worker_run):
    """What a thread writes that an earlier run has left behind is no line of a later run."""
    steps = [threading.Event() for _ in range(6)]

    def write():
        for n in (0, 2, 4):
            steps[n].wait()
            print(f"step {n}")
            logging.getLogger("app").warning("step %d", n)
            steps[n + 1].set()

    def let(n):
        steps[n].set()
        assert steps[n + 1].wait(10)

    thread = threading.Thread(target=write)
    assert worker_run(thread.start, lambda: let(0)) == ["step 0", "step 0"]
    assert worker_run(lambda: let(2), lambda: print("own")) == ["own"]
    assert worker_run(lambda: print("own"), lambda: let(4)) == ["own"]
    thread.join()


async def test_threads_of_a_pool_that_is_kept(worker_run):
    """Threads of a pool that an earlier run has made write lines of the run that uses them."""
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        async def use_pool():
            while line_capture._list_busy_threads() & pool._threads:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return worker_run(lambda: pool.submit(print, "from the pool").result(10))

        for _ in range(3):
            assert await use_pool() == ["from the pool"]
        assert worker_run(lambda: pool.submit(gate.wait)) == []
        gate.set()
        assert await use_pool() == ["from the pool"]


async def test_children_are_not_captured(site):
    """What child processes and forks write is no line of the run, and does not disturb it."""
    assert texts(await site.lines(writers.write_from_a_fork, executor=PROCESS)) == ["from the worker"]


async def test_two_runs_at_once(site):
    """Lines of two runs that write at the same time in threads do not mix."""
    handles = [await site.submit(writers.write_in_turn, name, executor=THREAD) for name in ("a", "b")]
    for handle in handles:
        await handle.result(timeout_s=30)
    for handle, name in zip(handles, "ab", strict=True):
        assert texts(site.store.lines(handle.uuid)) == [f"{name} {n}" for n in range(20) for _ in range(3)]


# --- nothing else -----------------------------------------------------------------------------------------------------


async def test_outside_of_a_run(site):
    """What is written outside of a run is no line, and passes to where it went before."""
    await site.run(writers.write_nothing, executor=INLINE)
    print("outside")
    logging.getLogger("app.part").warning("outside")
    await site.run(writers.write_nothing, executor=INLINE)
    assert [report for report in site.store.reports if report.lines] == []


async def test_a_silent_run_reports_nothing(site):
    """A run that writes nothing sends no report."""
    for executor in EXECUTORS:
        await site.run(writers.write_nothing, executor=executor)
    assert site.store.reports == []


async def test_engine_s_own_records(site, caplog):
    """What the engine logs about a failed run is no line of it."""
    lines = await site.lines(writers.write_and_raise, executor=INLINE)
    assert "[fail]" in caplog.text
    assert len(lines) == 1


async def test_all_is_put_back(capsys):
    """When the last engine has stopped, the streams and `logging` are as before."""
    before = sys.stdout, sys.stderr, logging.Logger.callHandlers
    async with open_site() as one:
        await one.run(writers.write_all, executor=INLINE)
        async with open_site() as other:
            await other.run(writers.write_all, executor=INLINE)
            assert sys.stdout is not before[0]
        assert shown(await one.lines(writers.write_all, executor=INLINE)) == ALL_WAYS
    assert (sys.stdout, sys.stderr, logging.Logger.callHandlers) == before
    assert capsys.readouterr().out == "by print\n" * 3


async def test_streams_that_are_replaced(site, monkeypatch):
    """Streams that something replaces while an engine runs are captured from the next run on."""
    await site.run(writers.write_all, executor=INLINE)
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stdout", replaced)
    assert shown(await site.lines(writers.write_all, executor=INLINE)) == ALL_WAYS
    assert replaced.getvalue() == "by print\n"


async def test_a_stream_that_was_kept(monkeypatch):
    """A captured stream that is used after the last engine has stopped still writes to the old one."""
    old = io.StringIO()
    monkeypatch.setattr(sys, "stdout", old)
    async with open_site() as site:
        await site.run(writers.write_nothing, executor=INLINE)
        kept = sys.stdout
    assert sys.stdout is old
    print("later", file=kept)
    assert old.getvalue() == "later\n"


async def test_a_function_over_ours():
    """A function that is put over ours in `logging` stays, and lines are recorded once, also by the next engine."""
    before = logging.Logger.callHandlers
    try:
        async with open_site() as site:
            await site.run(writers.write_nothing, executor=INLINE)
            ours = logging.Logger.callHandlers

            def theirs(logger, record):
                return ours(logger, record)

            logging.Logger.callHandlers = theirs  # type: ignore[method-assign]
            assert shown(await site.lines(writers.write_all, executor=INLINE)) == ALL_WAYS
        assert logging.Logger.callHandlers is theirs
        async with open_site() as site:
            assert shown(await site.lines(writers.write_all, executor=INLINE)) == ALL_WAYS
    finally:
        logging.Logger.callHandlers = before  # type: ignore[method-assign]


def test_capture_without_runs():
    """Starting and stopping the capture leaves everything as it was, however often."""
    before = sys.stdout, logging.Logger.callHandlers
    for _ in range(2):
        line_capture.start_capture()
        line_capture.start_capture()
        line_capture.stop_capture()
        assert sys.stdout is not before[0]
        line_capture.stop_capture()
        assert (sys.stdout, logging.Logger.callHandlers) == before


# --- the end of a run -------------------------------------------------------------------------------------------------


@EVERY
async def test_lines_come_before_the_settle(site, executor):
    """All lines of a run reach the store before its settle does."""
    uuids = [await site.run(writers.write_many, 200, executor=executor) for _ in range(3)]
    for uuid in uuids:
        kinds = [kind for kind, what in site.store.told if _is_of(what, uuid)]
        assert kinds == ["report"] * (len(kinds) - 1) + ["settle"]
        assert len(site.store.lines(uuid)) == 200


def _is_of(what, uuid):
    return what == uuid if isinstance(what, str) else what.claim.uuid == uuid


@PROCESSES
async def test_a_worker_that_is_killed(site, executor):
    """Lines that a worker wrote before SIGKILL are kept."""
    lines = await site.lines(writers.write_and_die, 3, executor=executor)
    assert texts(lines) == ["line 0", "line 1", "line 2", "last words"]


# --- bounds -----------------------------------------------------------------------------------------------------------


def total(lines: list[LogLine]) -> int:
    return sum(line.dropped or 1 for line in lines)


@pytest.mark.parametrize("executor", [INLINE, THREAD, PROCESS])
@pytest.mark.parametrize("function", [writers.write_many, writers.write_at_once], ids=["one by one", "at once"])
async def test_many_lines(site, executor, function):
    """Of many lines the latest reach the store, and a line says how many were dropped."""
    uuid = await site.run(function, 5000, executor=executor)
    lines = site.store.lines(uuid)
    assert lines[-1].text == "line 4999"
    assert total(lines) == 5000
    assert [line.at for line in lines] == sorted({line.at for line in lines})
    for report in site.store.reports:
        assert len(report.lines) <= LINES_KEPT


async def test_a_long_line(site):
    """A long line loses its middle, and shows that it did."""
    [line] = await site.lines(writers.write_many, 1, "x" * 100_000, executor=PROCESS)
    assert line.text == "x" * (LINE_CHARS // 2) + "…" + "x" * (LINE_CHARS // 2 - 3) + " 0"
    assert len(line.text) == LINE_CHARS


async def test_a_long_line_in_pieces(site):
    """A line that is printed piece by piece keeps its beginning and its end."""
    [line] = await site.lines(writers.write_in_pieces, 5000, executor=INLINE)
    written = "".join(f"<{n}>" for n in range(5000))
    head, _, tail = line.text.partition("…")
    assert (len(line.text), written.startswith(head), written.endswith(tail)) == (LINE_CHARS, True, True)
    assert min(len(head), len(tail)) > LINE_CHARS // 2 - 2


async def test_a_long_traceback(site):
    """A line with a long traceback names the error at its end."""
    [line] = await site.lines(writers.write_a_long_traceback, executor=INLINE)
    assert line.text.startswith("it went wrong\nTraceback")
    assert line.text.endswith("KeyError: 'the end'")
    assert len(line.text) == LINE_CHARS


@pytest.mark.parametrize("executor", [THREAD, PROCESS])
async def test_a_tight_loop(site, executor):
    """A run that prints without pause sends few reports, and leaves the event loop to others."""
    handle = await site.submit(writers.write_for, 1.0, executor=executor)
    longest = 0.0
    waiting = asyncio.ensure_future(handle.result(timeout_s=30))
    while not waiting.done():
        began = time.monotonic()
        await asyncio.sleep(0.001)
        longest = max(longest, time.monotonic() - began)
    reports = [report for report in site.store.reports if report.lines]
    assert len(reports) <= 2 + 1.0 / LINES_EVERY_S + 1
    assert sum(total(list(report.lines)) for report in reports) == await waiting
    assert longest < 0.5


def test_joined_lines_are_bounded():
    """Lines that wait for the store together stay within their bounds, and the dropped ones are counted."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    lines = [LogLine(start + timedelta(seconds=n), "info", f"{n}", "run") for n in range(3 * LINES_KEPT)]
    joined: tuple[LogLine, ...] = ()
    for n in range(0, len(lines), 100):
        joined = join_lines(joined, lines[n : n + 100])
    assert len(joined) == LINES_KEPT
    assert (joined[0].dropped, joined[0].text) == (2 * LINES_KEPT + 1, "")
    assert list(joined[1:]) == lines[-LINES_KEPT + 1 :]
    assert joined[0].at < joined[1].at
    long = [LogLine(start + timedelta(seconds=n), "info", "x" * LINE_CHARS, "run") for n in range(200)]
    kept = join_lines(long, ())
    assert sum(len(line.text) for line in kept[1:]) <= LINES_CHARS
    assert total(list(kept)) == 200


def test_reports_are_joined():
    """Two reports of a run become one with the lines of both, in order, and the latest pid."""
    claim = Claim(a_record(), 1, 1)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    one, two = LogLine(at, "info", "one", "run"), LogLine(at + timedelta(seconds=1), "info", "two", "run")
    joined = Report(claim, lines=(two,), note=Note.remark("n")).after(Report(claim, lines=(one,), worker_pid=7))
    assert (joined.lines, joined.note, joined.worker_pid) == ((one, two), Note.remark("n"), 7)


async def test_times_of_a_clock_that_stands():
    """Lines that are written at the same moment have different times."""
    reports: list[Report] = []
    now = datetime(2026, 1, 1, tzinfo=UTC)
    host = RunHost(asyncio.get_running_loop(), reports.append, now=lambda: now)
    run = RunHandle(Claim(a_record(), 1, 1), host)
    for n in range(5):
        run.context.log("%d", n)
    run.end()
    lines = [line for report in reports for line in report.lines]
    assert texts(lines) == list("01234")
    assert [line.at - now for line in lines] == [timedelta(microseconds=n) for n in range(5)]


# --- the worker -------------------------------------------------------------------------------------------------------


@PROCESSES
async def test_the_pid_of_the_worker(site, executor):
    """Reports of a run in a worker process say which one it is."""
    await site.run(writers.write_all, executor=executor)
    [pid] = {report.worker_pid for report in site.store.reports}
    assert pid is not None


async def test_the_pid_in_results(desk):
    """The result of a call in a worker process names the worker, whether the code returns, raises or dies."""
    pid = await desk.value(os.getpid)
    for function in (os.getpid, writers.write_and_raise, misdeeds.kill_self):
        assert (await desk.ask(function)).worker_pid == pid


@pytest.mark.parametrize("executor", [INLINE, THREAD])
async def test_no_pid_elsewhere(site, executor):
    """Reports of a run in the node's own process name no worker."""
    await site.run(writers.write_all, executor=executor)
    assert {report.worker_pid for report in site.store.reports} == {None}
