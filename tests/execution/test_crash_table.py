"""Every way a worker can die, hang or hide: the right answer, a pool that goes on, and nothing left."""

import asyncio
import os
import signal

import pytest

from taskyard.model.execution import ErrorKind
from tests.execution import misdeeds
from tests.execution.census import descendants, ended, is_alive, open_fds, resident
from tests.execution.conftest import nursery_pid

MEMORY_LIMIT = 512 << 20
TIMEOUT_S = 0.05
FLAT = 4 << 20
"""Bytes that forty deaths may leave in memory: less than half of what their readers alone have taken."""
RUNTIME, SYSTEM, TIMEOUT = ErrorKind.RUNTIME, ErrorKind.SYSTEM, ErrorKind.TIMEOUT

CRASHES = [
    pytest.param(misdeeds.segfault, (), SYSTEM, "SIGSEGV", id="segfault"),
    pytest.param(misdeeds.leave, (), SYSTEM, "code 3", id="exit"),
    pytest.param(misdeeds.leave, (0,), SYSTEM, "code 0", id="exit-as-if-nothing-was"),
    pytest.param(misdeeds.kill_self, (), SYSTEM, "SIGKILL", id="sigkill"),
    pytest.param(misdeeds.take_memory, (1 << 30,), SYSTEM, "limit of 512 MiB", id="memory-limit"),
    pytest.param(misdeeds.return_lock, (), SYSTEM, "result could not be sent", id="result-does-not-pickle"),
    pytest.param(misdeeds.return_one_way, (), SYSTEM, "result could not be read", id="result-does-not-unpickle"),
    pytest.param(misdeeds.raise_one_way, (), RUNTIME, "gone bad", id="exception-does-not-unpickle"),
    pytest.param(misdeeds.write_garbage_on_every_socket, (), SYSTEM, "no answer", id="garbage-on-the-wire"),
    pytest.param(misdeeds.close_everything, (), SYSTEM, "closed its wire", id="wire-closed"),
    pytest.param(misdeeds.kill_keeper, (), SYSTEM, "was lost", id="keeper-killed"),
    pytest.param(misdeeds.stop_keeper, (), TIMEOUT, "timeout", id="keeper-stopped"),
    pytest.param(misdeeds.hang, (), TIMEOUT, "timeout", id="hangs"),
    pytest.param(misdeeds.spin, (), TIMEOUT, "timeout", id="spins"),
    pytest.param(misdeeds.hold_the_gil, (), TIMEOUT, "timeout", id="holds-the-gil"),
    pytest.param(misdeeds.ignore_sigterm, (), TIMEOUT, "timeout", id="ignores-sigterm"),
]


@pytest.mark.spec("EXE-05", "EXE-08", "MGR-06")
@pytest.mark.parametrize("hides", [False, True], ids=["alone", "with-a-daemon"])
@pytest.mark.parametrize(("function", "args", "kind", "message"), CRASHES)
async def test_crash_table(open_desk, tmp_path, function, args, kind, message, hides):
    """Each way to die is answered with its kind; the next call works, and of the worker nothing is left, not even a
    grandchild that forked twice, left its session, closed its descriptors and cleared its environment."""
    desk = open_desk(max_workers=1, memory_limit=MEMORY_LIMIT, spare=False)
    await desk.value(misdeeds.pid)  # starts the nursery, which stays
    await desk.pool.shutdown()
    fds = open_fds()
    await desk.pool.start()
    before = await desk.value(misdeeds.pid)
    path = tmp_path / "pid"
    asked, given = (misdeeds.act_hidden, (str(path), function, args)) if hides else (function, args)
    result = await desk.ask(asked, *given, timeout_s=TIMEOUT_S if kind is TIMEOUT else None)
    assert result.error is not None
    assert result.error.kind is kind
    assert message in result.error.message
    if kind is TIMEOUT or "SIG" in message:
        # The slot is free only when the tree is gone: there is no need to wait for it.
        assert not is_alive(before)
        assert not (path.exists() and is_alive(int(path.read_text())))
    assert await desk.value(misdeeds.add, 1, 2) == 3
    await desk.pool.shutdown()
    assert open_fds() == fds
    assert not (path.exists() and is_alive(int(path.read_text())))
    assert await _left() == set()


async def _left() -> set[int]:
    """Who is left under the nursery, once the keepers that have said their last word are gone."""
    for pid in descendants(nursery_pid()):
        async with asyncio.timeout(2):
            await ended(pid)
    return descendants(nursery_pid())


async def test_a_kill_from_outside(desk):
    """A worker that somebody kills costs its call only."""
    pid = await desk.value(misdeeds.pid)
    call = desk.begin(misdeeds.hang)
    os.kill(pid, signal.SIGKILL)
    result = await call.future
    assert result.error is not None
    assert (result.error.kind, result.worker_pid) == (SYSTEM, pid)
    assert "SIGKILL" in result.error.message
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_noise_does_not_reach_the_wire(desk, capfd):
    """What code and its children print goes where the host's output goes."""
    assert await desk.value(misdeeds.make_noise) == "quiet again"
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_a_fork_that_comes_back_says_nothing(desk):
    """Of a process and its fork that both return from the call, only the worker itself answers."""
    assert await desk.value(misdeeds.fork_and_return) == "parent"
    assert await desk.value(misdeeds.add, 1, 2) == 3


@pytest.mark.parametrize("count", [1, 200])
async def test_a_crowd_is_gone(desk, make_pipe, tmp_path, count):
    """Of two hundred processes, half of them in sessions of their own, none is left when the timeout is answered."""
    path, began = tmp_path / "pids", make_pipe("began")
    call = desk.begin(misdeeds.fork_many, str(path), began.path, count)
    await began.wait()
    desk.pool.end_now(call)
    await call.future
    crowd = {int(pid) for pid in path.read_text().split()}
    assert len(crowd) == count
    assert not {pid for pid in crowd if is_alive(pid)}


async def test_who_runs_away_is_caught(desk, make_pipe):
    """A process that forks and ends, again and again, each time in a session of its own, does not get away."""
    began = make_pipe("began")
    call = desk.begin(misdeeds.run_from_killers, began.path)
    await began.wait()
    desk.pool.end_now(call)
    await call.future
    await desk.pool.shutdown()
    assert await _left() == set()


@pytest.mark.slow
async def test_fifty_hard_timeouts(open_desk, tmp_path):
    """Fifty hangs of every kind, each with a hidden grandchild: all gone at once, no innocent call fails, descriptors
    and memory, the nursery's too, stay flat."""
    desk = open_desk(max_workers=2)
    kinds = [misdeeds.hang, misdeeds.spin, misdeeds.hold_the_gil, misdeeds.ignore_sigterm]
    await asyncio.gather(*(desk.value(misdeeds.pid) for _ in range(2)))
    fds, memory = 0, {}
    for number in range(50):
        path = tmp_path / str(number)
        hung = desk.begin(misdeeds.act_hidden, str(path), kinds[number % len(kinds)], (), timeout_s=TIMEOUT_S)
        assert await desk.value(misdeeds.add, number, 1) == number + 1
        result = await hung.future
        assert result.error is not None
        assert result.error.kind is TIMEOUT
        assert not (path.exists() and is_alive(int(path.read_text())))
        await desk.value(misdeeds.pid)
        if number == 10:
            fds, memory = open_fds(), {pid: resident(pid) for pid in (os.getpid(), nursery_pid())}
    assert max(resident(pid) - size for pid, size in memory.items()) < FLAT
    await desk.pool.shutdown()
    assert open_fds() <= fds
    assert await _left() == set()
