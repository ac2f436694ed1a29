"""Ctrl-C while plain code waits, and forks of the host: nothing goes on unseen, and nobody waits for ever."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from taskyard import ExecutionDispatcher, NoopExecutor
from taskyard.algorithms import BlockingExecutor
from taskyard.execution.io_pool import ThreadPool
from taskyard.futures import PoolForked, ProcessPool
from tests.execution import deeds
from tests.execution.asking import PATIENCE_S, spec
from tests.execution.census import is_alive
from tests.scenario.processes import run_python


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def holding(executor: str) -> ExecutionDispatcher:
    dispatcher = ExecutionDispatcher()
    dispatcher.install(deeds.hold, spec=spec("hold", executor=executor))
    return dispatcher


def test_an_interrupt_ends_the_call_that_is_waited_for(stage, ctrl_c):
    """Ctrl-C while a call in a worker process is waited for ends that process, and the block can be left."""
    before = set(threading.enumerate())
    with ThreadPoolExecutor(1) as beside:
        begun = beside.submit(lambda: (int(stage.wait_until_begun()), ctrl_c())[0])
        with pytest.raises(KeyboardInterrupt), BlockingExecutor(holding("process")) as sync:
            sync.run("hold", (stage.began, stage.gate))
        assert not is_alive(begun.result())
    assert set(threading.enumerate()) <= before


def test_an_interrupt_ends_the_calls_of_other_threads_too(stage):
    """When Ctrl-C ends the block, whoever waits in another thread is told, and its worker process is gone."""
    with ThreadPoolExecutor(1) as beside:
        sync = BlockingExecutor(holding("process")).__enter__()
        waits = beside.submit(sync.run, "hold", (stage.began, stage.gate))
        pid = int(stage.wait_until_begun())
        sync.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        with pytest.raises(CancelledError):
            waits.result(PATIENCE_S)
        assert not is_alive(pid)


def test_a_thread_does_not_hold_up_an_interrupt(stage, caplog, ctrl_c):
    """Ctrl-C leaves the block also where the call runs in a thread, which nobody can end."""
    with ThreadPoolExecutor(1) as beside:
        beside.submit(lambda: (stage.wait_until_begun(), ctrl_c()))
        with pytest.raises(KeyboardInterrupt), BlockingExecutor(holding("thread")) as sync:
            sync.run("hold", (stage.began, stage.gate))
    assert "left behind" in caplog.text
    (left,) = [thread for thread in threading.enumerate() if thread.name == "taskyard-thread"]
    stage.let_go()
    left.join(PATIENCE_S)


# --- forks ------------------------------------------------------------------------------------------------------------


def in_a_fork(action: Callable[[], Any]) -> str:
    """What `action` raises in a forked child, by name; its value as text if nothing. A child that hangs is killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        try:
            said = str(action())
        except BaseException as exc:
            said = type(exc).__name__
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("make", [ThreadPool, ProcessPool])
def test_a_pool_across_a_fork(make):
    """A pool that was used before a fork says so in the child at once, even where a thread held its lock when the fork
    came; shutting it down there returns. One that was not used works."""
    used, fresh = make(1), make(1)
    with used, fresh:
        assert used.submit(deeds.echo, 1).result(PATIENCE_S) == 1
        lock = used._news if make is ThreadPool else used._loop._lock
        with lock:  # as whoever submits holds it for a moment
            assert in_a_fork(lambda: used.submit(deeds.echo, 1)) == PoolForked.__name__
            assert in_a_fork(used.shutdown) == "None"
        assert in_a_fork(lambda: fresh.submit(deeds.echo, 2).result(PATIENCE_S)) == "2"
        assert used.submit(deeds.echo, 3).result(PATIENCE_S) == 3


FORKED = """
import os, sys
from taskyard.execution.io_pool import ThreadPool
from taskyard.futures import ProcessPool
from tests.execution import deeds

if __name__ == "__main__":
    pool = {"ThreadPool": ThreadPool, "ProcessPool": ProcessPool}[sys.argv[1]](1)
    stage = deeds.Stage(sys.argv[2])
    held = pool.submit(deeds.hold, (stage.began, stage.gate), "held")
    stage.wait_until_begun()
    child = os.fork()
    if child == 0:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    stage.let_go()
    print(held.result())
"""


@pytest.mark.parametrize("make", [ThreadPool, ProcessPool])
def test_the_end_of_a_fork_does_not_wait_for_the_parents_pool(make, tmp_path):
    """An interpreter that was forked while its parent's pool works ends at once, and the parent's work goes on."""
    assert run_python(FORKED, make.__name__, str(tmp_path)) == "held\n"


def test_a_blocking_executor_across_a_fork():
    """In a forked child its loop does not run: a call says so instead of waiting for it, and the block can be left."""
    blocking = BlockingExecutor(NoopExecutor())
    with blocking as sync:
        assert in_a_fork(lambda: sync.run("any", None)) == PoolForked.__name__
        assert in_a_fork(lambda: blocking.__exit__(None, None, None)) == "None"
        assert sync.run("any", None).success
