"""What goes wrong beside a call: threads and forks that outlive it, listeners that raise, workers that die half way."""

import asyncio
import fcntl
import logging
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import termios
import threading
from typing import Any, NoReturn

import pytest

from taskyard.execution.context import current_run
from taskyard.execution.hosted import HostedWorker
from taskyard.execution.starting import Starter, WorkerHandle
from taskyard.futures import ProcessPool
from taskyard.manager import ExecutorManager, ManagerSettings, get_executor_manager
from taskyard.model.execution import ErrorKind
from tests.execution import deeds, misdeeds
from tests.execution.census import ended, open_fds


def speak_later(let_go: str) -> None:
    """Leave a thread behind that speaks for this run when the next call is running."""
    run = current_run()

    def speak() -> None:
        read(let_go)
        run.note("too late")
        run.checkpoint(1)

    threading.Thread(target=speak, daemon=True).start()


def let_speak(let_go: str) -> str:
    write(let_go)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    return "unharmed"


def fork_and_work(path: str) -> int:
    """A forked child logs, asks whether it is canceled, and then does its work: its exit code says whether it did."""
    run = current_run()
    pid = os.fork()
    if pid == 0:
        logging.getLogger("app").error("said in the child")
        run.note("noted in the child")
        with open(path, "w") as file:
            file.write(f"cancelled: {run.cancelled}")
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def report(value: float) -> float:
    current_run().progress(value)
    return value


def read(path: str) -> None:
    """Wait until another process, or thread, writes there."""
    with open(path) as pipe:
        pipe.read(1)


def wait_and_return(size: int, path: str | None = None) -> bytes:
    if path is not None:
        read(path)
    return bytes(size)


def write(path: str) -> None:
    with open(path, "w") as pipe:
        pipe.write("!")


@pytest.fixture
def let_go(tmp_path):
    os.mkfifo(tmp_path / "let_go")
    return str(tmp_path / "let_go")


async def test_a_late_word_of_one_call_leaves_the_next_alone(desk, let_go):
    """A thread that a call left behind may still speak; nobody listens, and the call that runs now is not harmed."""
    await desk.value(speak_later, let_go, run=desk.run())
    assert await desk.value(let_speak, let_go, run=desk.run()) == "unharmed"
    assert desk.reports == []


async def test_a_forked_child_does_its_work(desk, tmp_path):
    """What it logs and notes goes unheard, and it reads nothing that is meant for its parent; but it is not ended."""
    assert await desk.value(fork_and_work, str(tmp_path / "done"), run=desk.run()) == 7
    assert (tmp_path / "done").read_text() == "cancelled: False"
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_a_listener_that_raises_loses_no_answer(desk, monkeypatch):
    """The last progress and the result may arrive together: what becomes of the one must not stop the other."""
    run = desk.run()
    monkeypatch.setattr(type(run), "report_progress", _raise)
    assert await desk.value(report, 0.5, run=run) == 0.5


def _raise(*_: object) -> None:
    raise RuntimeError("it failed")


def test_killing_a_pipelining_pool_answers_every_call():
    """Also those that were answered while their worker was being killed, one after the other."""
    for _ in range(5):
        pool = ProcessPool(1, pipeline=8)
        futures = [pool.submit(misdeeds.add, n, 1) for n in range(200)]
        futures[0].result(timeout=20)
        pool.kill_workers()
        assert all(future.done() for future in futures)
        pool.shutdown()


async def test_calls_that_wait_are_answered_when_no_worker_can_be_started(open_desk, monkeypatch):
    """All of them, though nobody submits another."""
    desk = open_desk(max_workers=1)
    monkeypatch.setattr("taskyard.execution.pool.START_AGAIN_S", 0.001)
    monkeypatch.setattr(desk.pool, "_starter", NoStarter())
    calls = [desk.begin(misdeeds.add, n, 1) for n in range(5)]
    async with asyncio.timeout(10):
        results = [await call.future for call in calls]
    assert {result.error.kind for result in results if result.error} == {ErrorKind.SYSTEM}
    assert len([result for result in results if result.error]) == 5


ADD_READER = "asyncio.SelectorEventLoop.add_reader"


class NoStarter:
    """Fails so often, and then hands on to another."""

    def __init__(self, times: float = math.inf, then: Starter | None = None) -> None:
        self.tries, self._times, self._then = 0, times, then

    def spawn(self, preload: tuple[str, ...] = ()) -> WorkerHandle:
        self.tries += 1
        if self._then is None or self.tries <= self._times:
            raise OSError("no process is to be had")
        return self._then.spawn(preload)


async def test_a_start_that_fails_is_no_matter_of_calls_that_others_serve(open_desk, monkeypatch, stage):
    """While a worker lives, calls wait for it, and one try at a time is made to start another."""
    desk = open_desk(max_workers=2, spare=False)
    await desk.value(misdeeds.pid)
    starter = NoStarter()
    monkeypatch.setattr(desk.pool, "_starter", starter)
    held = desk.begin(deeds.hold, (stage.began, stage.gate))
    await asyncio.to_thread(stage.wait_until_begun)
    calls = [desk.begin(misdeeds.add, n, 1) for n in range(20)]
    assert starter.tries == 1
    stage.let_go()
    assert (await held.future).success
    assert [(await call.future).data for call in calls] == list(range(1, 21))


@pytest.mark.parametrize("portable", [False, True], ids=["nursery", "portable"])
async def test_a_worker_that_cannot_be_watched(open_desk, monkeypatch, portable):
    """It is ended, its call is answered `system`, and nothing of either is left behind."""
    desk = open_desk(max_workers=1, spare=False, portable=portable)
    await open_desk(max_workers=1, spare=False).value(misdeeds.pid)  # has the nursery started
    fds = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start" if portable else ADD_READER, _raise)
        call = desk.begin(misdeeds.add, 1, 2)
    error = (await call.future).error
    assert error is not None
    assert (error.kind, error.message) == (ErrorKind.SYSTEM, "a worker process could not be started: it failed")
    assert open_fds() == fds
    health = desk.pool.health()
    assert (health.is_healthy, health.problem) == (False, "the last start of a worker has failed")
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert desk.pool.health().is_healthy
    assert desk.pool.numbers.done == 1


async def test_a_worker_that_cannot_be_heard(open_desk, monkeypatch):
    """It counts as one that could not start, and the next one serves its call."""
    desk = open_desk(max_workers=1, spare=False)
    add_reader = asyncio.SelectorEventLoop.add_reader
    fails = iter([False, True])

    def fail_second_time(*args: Any) -> None:
        if next(fails, False):
            raise OSError("no room to listen")
        add_reader(*args)

    monkeypatch.setattr(ADD_READER, fail_second_time)
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert desk.pool.numbers.crashed == 1


async def test_a_start_that_failed_is_tried_again(open_desk, monkeypatch, stage):
    """A call that waits is served by a worker that could not be started at first, though the other one stays busy."""
    desk = open_desk(max_workers=2, spare=False)
    await desk.value(misdeeds.pid)
    monkeypatch.setattr(desk.pool, "_starter", NoStarter(times=2, then=desk.pool._starter))
    held = desk.begin(deeds.hold, (stage.began, stage.gate))
    await asyncio.to_thread(stage.wait_until_begun)
    assert await desk.value(misdeeds.add, 1, 2) == 3
    stage.let_go()
    assert (await held.future).success


async def test_a_setup_that_fails_is_no_matter_of_calls_that_others_serve(open_desk, monkeypatch, tmp_path, stage):
    """Workers that die while they start answer no call that a living one will serve."""
    setup = pickle.dumps((os.mkdir, (str(tmp_path / "only_once"),)))
    desk = open_desk(max_workers=2, spare=False, setup=setup)
    await desk.value(misdeeds.pid)
    ends: asyncio.Queue[int] = asyncio.Queue()
    take_note = desk.pool.gone
    monkeypatch.setattr("taskyard.execution.pool.START_AGAIN_S", 0.001)

    def gone(worker: HostedWorker, status: int) -> None:
        take_note(worker, status)
        ends.put_nowait(status)

    monkeypatch.setattr(desk.pool, "gone", gone)
    held = desk.begin(deeds.hold, (stage.began, stage.gate))
    await asyncio.to_thread(stage.wait_until_begun)
    calls = [desk.begin(misdeeds.add, n, 1) for n in range(5)]
    for _ in range(4):
        await ends.get()
    stage.let_go()
    assert (await held.future).success
    assert [(await call.future).data for call in calls] == list(range(1, 6))


async def test_a_manager_that_could_not_be_made_is_not_kept(monkeypatch):
    """The next one is made anew, with what it is given."""
    with monkeypatch.context() as patch:
        patch.setattr("taskyard.manager.count_workers", _raise)
        with pytest.raises(RuntimeError):
            ExecutorManager()
    manager = get_executor_manager(ManagerSettings(cpu_workers=1))
    assert manager.cpu_executor.max_workers == 1
    await manager.shutdown()


async def test_a_worker_that_retires_before_it_is_ready_gets_no_call(open_desk):
    """A pool that is closed and opened again while a worker starts lets that one go."""
    desk = open_desk(max_workers=1)
    await desk.pool.start()
    await desk.pool.shutdown(wait=False)
    await desk.pool.start()
    assert [await desk.value(misdeeds.add, n, 1) for n in range(3)] == [1, 2, 3]


# --- workers that die with a call half sent ---------------------------------------------------------------------------

MORE_THAN_A_SOCKET_HOLDS = 30_000_000


async def test_what_was_not_received_is_sent_again(open_desk):
    """A call whose worker dies before it has all of it has not begun: another worker runs it."""
    desk = open_desk(max_workers=1, spare=False, portable=True)
    pid = await desk.value(misdeeds.pid)
    os.kill(pid, signal.SIGSTOP)
    call = desk.begin(len, bytes(MORE_THAN_A_SOCKET_HOLDS))
    os.kill(pid, signal.SIGKILL)
    assert (await call.future).data == MORE_THAN_A_SOCKET_HOLDS
    assert desk.pool.numbers.crashed == 1


async def test_what_was_not_received_has_its_timeout(open_desk):
    """A call that ran out of time while it was being sent is a timeout, and not sent again."""
    desk = open_desk(max_workers=1, spare=False, portable=True)
    pid = await desk.value(misdeeds.pid)
    await desk.value(len, b"")
    os.kill(pid, signal.SIGSTOP)
    error = (await desk.ask(len, bytes(MORE_THAN_A_SOCKET_HOLDS), timeout_s=0.05)).error
    assert error is not None
    assert error.kind is ErrorKind.TIMEOUT


async def test_what_workers_die_of_is_not_sent_for_ever(open_desk):
    """A call that no worker has the memory to receive is answered `system`."""
    desk = open_desk(max_workers=1, spare=False, portable=True, memory_limit=256 << 20)
    error = (await desk.ask(len, bytes(400 << 20))).error
    assert error is not None
    assert (error.kind, error.message) == (ErrorKind.SYSTEM, "its worker process exited with code 1")
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_a_worker_that_is_dying_gets_no_call(open_desk):
    """One that died in its idleness is passed over, before its keeper has said that it is gone."""
    desk = open_desk(max_workers=1, spare=False)
    pid, keeper = await desk.value(misdeeds.pid), await desk.value(misdeeds.keeper)
    (dying,) = desk.pool._workers
    os.kill(keeper, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    await ended(pid)
    call = desk.begin(misdeeds.pid)
    assert call.worker is not dying
    os.kill(keeper, signal.SIGCONT)
    assert (await call.future).data != pid
    assert desk.pool.numbers.done == 3


# --- calls that cannot be sent ----------------------------------------------------------------------------------------


class Insatiable:
    def __reduce__(self) -> NoReturn:
        raise MemoryError


async def test_no_memory_to_send_a_call_is_no_fault_of_the_call(desk):
    """It is answered `system`, so that it may be tried again."""
    error = (await desk.ask(misdeeds.keyword, kwargs={"value": Insatiable()})).error
    assert error is not None
    assert error.kind is ErrorKind.SYSTEM


async def test_no_descriptor_to_send_a_call_is_no_fault_of_the_call(open_desk):
    """It is answered `system`, and the next call works."""
    desk = open_desk(max_workers=1, spare=False)
    await desk.value(misdeeds.pid)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        call = desk.begin(len, bytes(MORE_THAN_A_SOCKET_HOLDS))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    error = (await call.future).error
    assert error is not None
    assert error.kind is ErrorKind.SYSTEM
    assert "Too many open files" in error.message
    assert await desk.value(misdeeds.add, 1, 2) == 3


# --- late timers ------------------------------------------------------------------------------------------------------


def arrived(wire: socket.socket) -> int:
    """Bytes that nobody has read yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(wire, termios.FIONREAD, bytes(4)))
    return int(count)


@pytest.mark.parametrize("size", [1, 100_000])
async def test_an_answer_that_has_arrived_is_no_timeout(open_desk, let_go, size):
    """When the timer is found first, as by a host that was stopped meanwhile, the wire is read before it is judged."""
    desk = open_desk(max_workers=1, spare=False, portable=True)
    await desk.value(wait_and_return, 0)
    call = desk.begin(wait_and_return, size, let_go, timeout_s=60)
    (worker,) = desk.pool._workers
    write(let_go)
    while arrived(worker._wire) < size:
        select.select([worker._wire], [], [], 0.001)
    worker._deadline_mono = 0.0
    worker._fire()
    assert (await call.future).data == bytes(size)
    assert desk.pool.numbers.killed == 0


# --- names ------------------------------------------------------------------------------------------------------------


async def test_text_that_mentions_main_is_not_the_script(desk, monkeypatch):
    """Only a name in `__main__` makes a worker load the host's script."""
    monkeypatch.setattr("taskyard.execution.scene.load_main", None)
    text = 'if __name__ == "__main__":\n    main()'
    assert await desk.value(misdeeds.keyword, kwargs={"value": text}) == text


async def test_who_waits_behind_a_call_that_is_ended_runs_elsewhere(open_desk):
    """Calls that were sent ahead and had not begun are sent again when the one before them has to be ended."""
    desk = open_desk(max_workers=1, pipeline=4, cancel_grace_s=0.05)
    await desk.value(misdeeds.add, 1, 2)
    run = desk.run()
    hung = desk.begin(misdeeds.hang, run=run)
    behind = [desk.begin(misdeeds.add, n, 1) for n in range(3)]
    run.request_cancel()
    desk.pool.interrupt(hung)
    assert [(await call.future).data for call in behind] == [1, 2, 3]
    error = (await hung.future).error
    assert error is not None
    assert error.kind is ErrorKind.CANCELED
