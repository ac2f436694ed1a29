"""A pool: who waits, who runs, who is replaced, how a call is ended early, and what is told meanwhile."""

import asyncio
import logging
import math
import os
import pickle
import sys
import time

import pytest

from taskyard.execution.nursery import NURSERY
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool
from taskyard.execution.progress_values import PROGRESS_INTERVAL_S
from taskyard.model.execution import ErrorKind
from taskyard.model.notes import Note
from tests.execution import deeds, misdeeds, slow_import
from tests.execution.census import is_alive, open_fds
from tests.execution.conftest import Desk

BOTH = pytest.mark.parametrize("portable", [False, True], ids=["nursery", "portable"])


# --- calls ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.spec("MGR-08")
@pytest.mark.parametrize("size", [10, 100_000, 5_000_000])
async def test_bytes_in_and_out(open_desk, portable, size):
    """Bytes of any size come back as they went in."""
    desk = open_desk(max_workers=1, portable=portable)
    content = os.urandom(size)
    assert await desk.value(bytes, content) == content
    assert await desk.value(misdeeds.keyword, kwargs={"value": content}) == content


@pytest.mark.spec("MGR-04")
async def test_methods_cross_by_name(desk):
    """Class methods, static methods, bound methods and nested names work like functions."""
    assert await desk.value(misdeeds.Tool.static, 3) == 4
    assert await desk.value(misdeeds.Tool.of_class, 3) == ("Tool", 3)
    assert await desk.value(misdeeds.Tool(10).bound, 3) == 13
    assert await desk.value(misdeeds.Tool.Inner.static, 3) == 5


async def test_what_cannot_be_sent_is_refused(desk):
    """A function that no worker can find is refused with its name, and the worker is not used up by it."""
    result = await desk.ask(lambda: None)
    assert result.error is not None
    assert result.error.kind is ErrorKind.VALIDATION
    assert "lambda" in result.error.message
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_what_cannot_be_found_is_an_import_error(desk):
    """A function whose module is missing in the worker is answered with that import's error."""
    result = await desk.ask(misdeeds.Unfindable())
    assert result.error is not None
    assert result.error.kind is ErrorKind.RUNTIME
    assert "could not be loaded" in result.error.message
    assert "ModuleNotFoundError" in result.error.types


async def test_importing_is_no_part_of_the_timeout(desk, monkeypatch):
    """A call whose code takes longer to import than its timeout still has all of it to run."""
    monkeypatch.setenv("TASKYARD_TESTS_SLOW_IMPORT", "1")  # a worker has the environment of its host's present
    result = await desk.ask(slow_import.quick, timeout_s=slow_import.IMPORT_S / 2)
    assert result.success, result.error
    late = await desk.ask(misdeeds.hang, timeout_s=0.01)
    assert late.error is not None
    assert late.error.kind is ErrorKind.TIMEOUT


async def test_an_import_that_hangs_is_ended(open_desk, monkeypatch):
    """What cannot be imported within the limit for it is a timeout, and its worker is gone."""
    monkeypatch.setenv("TASKYARD_TESTS_SLOW_IMPORT", "1")
    desk = open_desk(max_workers=1, load_s=0.3, preload=())
    await desk.value(math.sqrt, 4)
    result = await desk.ask(slow_import.quick, timeout_s=60)
    assert result.error is not None
    assert result.error.kind is ErrorKind.TIMEOUT
    assert "imported" in result.error.message


@BOTH
async def test_a_large_setup_holds_up_nobody(open_desk, portable):
    """Megabytes for a worker's setup are sent as it takes them: nobody waits until it does."""
    setup = pickle.dumps((misdeeds.keep, (b"x" * 50_000_000,)))
    desk = open_desk(max_workers=1, setup=setup, portable=portable)
    await desk.pool.start()
    (worker,) = desk.pool._workers
    assert worker._unsent
    assert await desk.value(misdeeds.kept) == 50_000_000


@BOTH
async def test_surroundings_of_any_bytes(open_desk, monkeypatch, portable):
    """Arguments and variables of the host that are no valid text are the same in its workers."""
    odd = os.fsdecode(b"\xff\xfe")
    monkeypatch.setattr(sys, "argv", [*sys.argv, odd])
    monkeypatch.setenv("TASKYARD_TESTS_ODD", odd)
    desk = open_desk(max_workers=1, spare=False, portable=portable)
    assert await desk.value(misdeeds.surroundings, "TASKYARD_TESTS_ODD") == (sys.argv, odd)


@BOTH
async def test_a_search_path_with_what_is_no_text(open_fresh, monkeypatch, tmp_path, portable):
    """A `Path` in `sys.path`, which Python itself passes over, keeps no worker from starting."""
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    assert await open_fresh(portable=portable).value(misdeeds.add, 1, 2) == 3


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_first_come_first_served(open_desk, tmp_path):
    """Calls run in the order in which they were submitted."""
    desk = open_desk(max_workers=1)
    path = tmp_path / "order"
    await asyncio.gather(*(desk.value(misdeeds.append, str(path), f"{n} ") for n in range(20)))
    assert path.read_text().split() == [str(n) for n in range(20)]


@pytest.mark.spec("EXE-05", "EXE-06")
async def test_waiting_for_a_worker_has_a_limit_of_its_own(open_desk):
    """A call that finds no worker in time is a timeout without having run; what runs is not touched by that limit."""
    desk = open_desk(max_workers=1, wait_s=0.1, queue_limit=1)
    await desk.value(misdeeds.pid)
    running = desk.begin(misdeeds.hang)
    waiting = desk.begin(misdeeds.add, 1, 2, timeout_s=60)
    rejected = await desk.ask(misdeeds.add, 1, 2)
    assert rejected.error is not None
    assert rejected.error.kind is ErrorKind.REJECTED
    result = await waiting.future
    assert result.error is not None
    assert result.error.kind is ErrorKind.TIMEOUT
    assert "no worker was free" in result.error.message
    assert not running.future.done()
    desk.pool.end_now(running)


async def test_the_limit_on_waiting_holds_where_calls_are_sent_ahead(open_desk, tmp_path):
    """A call that may not wait for long is not sent ahead, so that it can be answered in time and never begins."""
    desk = open_desk(max_workers=1, pipeline=4, spare=False)
    await desk.value(misdeeds.pid)
    running = desk.begin(misdeeds.hang)
    waiting = desk.begin(misdeeds.append, str(tmp_path / "ran"), "!", wait_s=0.05)
    error = (await waiting.future).error
    assert error is not None
    assert error.kind is ErrorKind.TIMEOUT
    assert "no worker was free" in error.message
    desk.pool.end_now(running)
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert not (tmp_path / "ran").exists()


async def test_a_call_that_is_sent_back_waits_no_longer(open_desk):
    """The limit on waiting begins once, though the worker it was given to has died before it had all of it."""
    desk = open_desk(max_workers=1, wait_s=60)
    await desk.value(misdeeds.pid)
    running = desk.begin(misdeeds.hang)
    call = desk.begin(misdeeds.add, 1, 2)
    first = call.waiting
    assert first is not None
    first.cancel()
    desk.pool._forget(call)
    desk.pool._take_back(call)
    assert call.waiting is not first
    assert call.waiting is not None
    assert call.waiting.when() == first.when()
    desk.pool.end_now(running)
    assert (await call.future).data == 3


async def test_a_spare_is_ready(open_desk, tmp_path):
    """While calls run on all workers, one process more is ready to take the place of one that dies."""
    os.mkfifo(tmp_path / "pids")
    setup = pickle.dumps((misdeeds.say_pid, (str(tmp_path / "pids"),)))
    desk = open_desk(max_workers=1, setup=setup)
    with open(os.open(tmp_path / "pids", os.O_RDWR)) as pids:
        running = desk.begin(misdeeds.hang)
        both = [int(await asyncio.to_thread(pids.readline)) for _ in range(2)]
    desk.pool.end_now(running)
    dead = (await running.future).worker_pid
    assert await desk.value(misdeeds.pid) in {*both} - {dead}


async def test_numbers(open_desk):
    """The numbers are what happened."""
    desk = open_desk(max_workers=2, recycle_after=1000)
    assert desk.pool.numbers.workers == 0
    await desk.value(misdeeds.pid)
    holds = [desk.begin(misdeeds.hang, timeout_s=0.2) for _ in range(2)]
    queued = [desk.begin(misdeeds.pid) for _ in range(3)]
    await desk.ask(misdeeds.pid)
    for hold in holds:
        await hold.future
    await asyncio.gather(*(call.future for call in queued))
    await desk.ask(misdeeds.leave)
    numbers = desk.pool.numbers
    assert (numbers.active, numbers.queued) == (0, 0)
    assert (numbers.done, numbers.killed, numbers.crashed) == (8, 2, 1)


# --- replacing workers ------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-16")
async def test_recycling_by_count(open_desk):
    """A worker is replaced after so many calls."""
    desk = open_desk(max_workers=1, recycle_after=3)
    pids = [await desk.value(misdeeds.pid) for _ in range(9)]
    assert len(set(pids)) == 3
    assert desk.pool.numbers.recycled == 3


async def test_recycling_by_growth(open_desk):
    """A worker that keeps too much memory is replaced; one that only used it for a while is not."""
    desk = open_desk(max_workers=1, recycle_rss=300 << 20)
    first = await desk.value(misdeeds.pid)
    await desk.value(misdeeds.take_memory, 20 << 20)
    assert await desk.value(misdeeds.pid) == first
    await desk.value(misdeeds.keep_memory, 400 << 20)
    assert await desk.value(misdeeds.pid) != first
    assert desk.pool.numbers.recycled == 1


async def test_a_memory_limit_leaves_room_for_the_rest(open_desk):
    """Under a memory limit what fits it works, and a worker that hit it is replaced."""
    desk = open_desk(max_workers=1, memory_limit=512 << 20)
    first = await desk.value(misdeeds.pid)
    assert await desk.value(misdeeds.take_memory, 100 << 20) == 100 << 20
    result = await desk.ask(misdeeds.take_memory, 1 << 30)
    assert result.error is not None
    assert "MemoryError" in result.error.types
    assert await desk.value(misdeeds.pid) != first


async def test_a_pool_that_cannot_start_says_so(open_desk, monkeypatch):
    """When no worker can be started each call is answered `system`, none waits for ever, and it goes on when it can."""
    desk = open_desk(max_workers=1)

    def refuse(_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(NURSERY, "spawn", refuse)
        for _ in range(3):
            result = await desk.ask(misdeeds.pid)
            assert result.error is not None
            assert result.error.kind is ErrorKind.SYSTEM
            assert "Too many open files" in result.error.message
    assert await desk.value(misdeeds.add, 1, 2) == 3


# --- pipelining -------------------------------------------------------------------------------------------------------


async def test_pipelined_calls_run_in_order(open_desk, tmp_path):
    """Calls sent ahead to one worker run one after the other, and each gets its own answer."""
    desk = open_desk(max_workers=1, pipeline=8, spare=False)
    await desk.value(misdeeds.pid)
    path = tmp_path / "order"
    calls = [desk.begin(misdeeds.append, str(path), f"{n} ") for n in range(30)]
    assert [(await call.future).data for call in calls] == [f"{n} " for n in range(30)]
    assert path.read_text().split() == [str(n) for n in range(30)]


async def test_what_had_not_begun_is_sent_again(open_desk, tmp_path):
    """Of the calls sent ahead to a worker that dies, only the one that ran is answered `system`; the others run."""
    desk = open_desk(max_workers=1, pipeline=4, spare=False)
    await desk.value(misdeeds.pid)
    path = tmp_path / "ran"
    first = desk.begin(misdeeds.leave)
    others = [desk.begin(misdeeds.append, str(path), f"{n} ") for n in range(3)]
    error = (await first.future).error
    assert error is not None
    assert error.kind is ErrorKind.SYSTEM
    assert [(await call.future).data for call in others] == ["0 ", "1 ", "2 "]
    assert path.read_text() == "0 1 2 "


async def test_the_time_of_a_pipelined_call_begins_with_it(open_desk, make_pipe):
    """A call that waits behind another one in the worker has all of its timeout when its turn comes."""
    desk = open_desk(max_workers=1, pipeline=4, spare=False)
    began, gate = make_pipe("began"), make_pipe("gate")
    stage = (began.path, gate.path)
    gate.write()
    await desk.value(deeds.hold, stage)
    calls = [desk.begin(deeds.hold, stage, timeout_s=60) for _ in range(2)]
    (worker,) = desk.pool._workers
    let_go_mono = time.monotonic()
    assert worker._deadline_mono < let_go_mono + 60
    gate.write()
    assert (await calls[0].future).success
    assert let_go_mono + 60 <= worker._deadline_mono <= time.monotonic() + 60
    gate.write()
    assert (await calls[1].future).success


async def test_what_was_sent_ahead_stays_as_it_was(open_desk, stage):
    """A caller may change its buffers as soon as the call is submitted, though its worker cannot take them yet."""
    desk = open_desk(max_workers=1, pipeline=7, spare=False)
    await desk.value(misdeeds.pid)
    held = desk.begin(deeds.hold, (stage.began, stage.gate))
    await asyncio.to_thread(stage.wait_until_begun)
    buffers = [bytearray(b"a") * 3_000_000 for _ in range(6)]  # more than a socket holds
    calls = [desk.begin(bytearray.count, buffer, b"a") for buffer in buffers]
    for buffer in buffers:
        buffer[:] = b"b" * len(buffer)
    stage.let_go()
    assert (await held.future).success
    assert [(await call.future).data for call in calls] == [3_000_000] * 6


# --- ending a call early ----------------------------------------------------------------------------------------------


@BOTH
async def test_code_that_looks_ends_by_itself(open_desk, make_pipe, portable):
    """A cancel reaches `current_run().cancelled`; code that heeds it ends in its own way, and its worker lives on."""
    desk = open_desk(max_workers=1, cancel_grace_s=60, portable=portable)
    pid = await desk.value(misdeeds.pid)
    began = make_pipe("began")
    call = desk.begin(misdeeds.wait_until_cancelled, began.path, run=desk.run())
    await began.wait()
    desk.pool.interrupt(call)
    assert (await call.future).data == "cleaned up"
    assert await desk.value(misdeeds.pid) == pid


@pytest.mark.spec("EXE-07")
async def test_code_that_does_not_look_can_clean_up(open_desk, make_pipe, tmp_path):
    """After the grace SIGTERM raises in the code, whose `finally` runs; the answer is `canceled`."""
    desk = open_desk(max_workers=1, cancel_grace_s=0.01, term_grace_s=60)
    began, cleaned = make_pipe("began"), tmp_path / "cleaned"
    call = desk.begin(misdeeds.clean_up_on_sigterm, began.path, str(cleaned))
    await began.wait()
    desk.pool.interrupt(call)
    error = (await call.future).error
    assert error is not None
    assert error.kind is ErrorKind.CANCELED
    assert cleaned.exists()
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_code_that_ignores_everything_is_killed(open_desk, make_pipe):
    """After SIGTERM comes SIGKILL; the answer is `canceled`, and comes when the process is gone."""
    desk = open_desk(max_workers=1, cancel_grace_s=0.01, term_grace_s=0.01)
    pid = await desk.value(misdeeds.pid)
    began = make_pipe("began")
    call = desk.begin(misdeeds.ignore_sigterm, began.path)
    await began.wait()
    desk.pool.interrupt(call)
    error = (await call.future).error
    assert error is not None
    assert error.kind is ErrorKind.CANCELED
    assert not is_alive(pid)


async def test_a_pipelined_call_that_is_canceled_before_its_turn(open_desk, make_pipe, tmp_path):
    """A cancel of a call that was sent ahead reaches it when its turn comes."""
    desk = open_desk(max_workers=1, pipeline=4, spare=False, cancel_grace_s=60)
    await desk.value(misdeeds.pid)
    gate = make_pipe("gate")
    first = desk.begin(misdeeds.report_then_wait, str(tmp_path), run=desk.run())
    second = desk.begin(misdeeds.wait_until_cancelled, str(tmp_path / "began"), run=desk.run())
    desk.pool.interrupt(second)
    gate.write()
    assert (await first.future).success
    assert (await second.future).data == "cleaned up"


# --- what a run says --------------------------------------------------------------------------------------------------


async def test_progress_in_a_tight_loop_costs_nothing(desk, monkeypatch):
    """Of a hundred thousand reports four a second cross, the last among them; the others cost microseconds."""
    run, heard = desk.run(), []
    monkeypatch.setattr(run, "report_progress", lambda *said: heard.append(said))
    spent_s, worked_s = await desk.value(misdeeds.report_in_a_tight_loop, 100_000, run=run)
    assert worked_s < 1
    assert len(heard) <= spent_s / PROGRESS_INTERVAL_S + 2
    assert heard[-1] == (1.0, "done", None, {})


async def test_the_last_word_before_a_silence_is_heard(desk, make_pipe, tmp_path):
    """A report that came too soon after another is sent when its time has come, though the code says nothing more."""
    gate = make_pipe("gate")
    run = desk.run()
    call = desk.begin(misdeeds.report_then_wait, str(tmp_path), run=run)
    async with asyncio.timeout(10):
        while "second" not in [report.progress and report.progress.message for report in desk.reports]:
            desk.has_reported.clear()
            await desk.has_reported.wait()
    assert not call.future.done()
    gate.write()
    await call.future


async def test_a_run_knows_itself_in_the_worker(desk, caplog):
    """The run's id, attempt and fencing token are there, and notes and log lines come back."""
    run = desk.run()
    seen = await desk.value(misdeeds.look_at_run, run=run)
    assert seen == (run.uuid, 1, 42, "fetch")
    assert [report.note for report in desk.reports if report.note is not None] == [Note.remark("hello")]
    assert [line.text for report in desk.reports for line in report.lines] == ["from inside"]
    assert f"from inside [task={run.uuid} consumer=fetch attempt=1]" in caplog.messages


async def test_log_lines_reach_the_host(desk, caplog):
    """What code logs in a worker goes through the host's handlers, at its level."""
    with caplog.at_level(logging.INFO):
        await desk.value(misdeeds.write_log, "from afar")
    assert [(record.name, record.levelname) for record in caplog.records if record.getMessage() == "from afar"] == [
        ("misdeeds", "WARNING")
    ]


async def test_names_of_loggers_do_not_pile_up(desk, caplog):
    """Whatever names a worker's code makes up for its loggers, the host handles their lines without keeping them."""
    before = len(logging.root.manager.loggerDict)
    await desk.value(misdeeds.write_many_logs, 100)
    assert [record.name for record in caplog.records][-1] == "made.up.99"
    assert len(logging.root.manager.loggerDict) - before < 10


@BOTH
async def test_what_code_starts_gets_no_wire(open_desk, portable):
    """A program that user code starts inherits none of the sockets of its worker."""
    desk = open_desk(max_workers=1, portable=portable)
    assert await desk.value(misdeeds.sockets_of_child) == 0


# --- life -------------------------------------------------------------------------------------------------------------


def test_a_pool_may_move_to_another_loop():
    """After a shutdown a pool serves on a new event loop."""
    pool = make_pool(PoolSettings(max_workers=1))

    async def use() -> int:
        await pool.start()
        total: int = await Desk(pool).value(misdeeds.add, 1, 2)
        await pool.shutdown()
        return total

    assert [asyncio.run(use()), asyncio.run(use())] == [3, 3]


@BOTH
async def test_a_shutdown_leaves_nothing(open_desk, portable):
    """After a shutdown there is no worker and no descriptor left."""
    await open_desk(max_workers=1).value(misdeeds.pid)  # the nursery itself stays
    fds = open_fds()
    desk = open_desk(max_workers=2, portable=portable)
    pids = {await desk.value(misdeeds.pid) for _ in range(4)}
    await desk.pool.shutdown()
    assert not {pid for pid in pids if is_alive(pid)}
    assert open_fds() == fds
    assert desk.pool.numbers.workers == 0


async def test_a_copy_is_sent_anew_with_every_call(desk):
    """A worker knows functions by number once it has them, but not the method of a list, which changes meanwhile."""
    numbers = [1]
    assert [await desk.value(numbers.count, 1) for _ in range(2)] == [1, 1]
    numbers.append(1)
    assert await desk.value(numbers.count, 1) == 2
    assert [await desk.value(misdeeds.add, number, 1) for number in range(3)] == [1, 2, 3]
