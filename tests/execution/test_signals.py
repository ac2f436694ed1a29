"""Signals: those meant for the host leave its workers alone, and those of the host do not reach what workers start."""

import asyncio
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskyard.execution.spawner import Spawner
from tests.execution import deeds, misdeeds
from tests.execution.census import descendants
from tests.execution.conftest import nursery_pid

BOTH = pytest.mark.parametrize("portable", [False, True], ids=["nursery", "portable"])


# --- SIGTERM to every process of a service ----------------------------------------------------------------------------


@BOTH
async def test_running_calls_keep_their_grace(open_desk, stage, portable):
    """A service manager that stops the host sends SIGTERM to every process of it: what runs may still finish."""
    desk = open_desk(max_workers=1, portable=portable)
    call = desk.begin(deeds.hold, (stage.began, stage.gate), "finished")
    pid = int(await asyncio.to_thread(stage.wait_until_begun))
    everybody = {pid}
    if not portable:
        everybody |= {nursery_pid(), *descendants(nursery_pid())}
    for each in everybody:
        os.kill(each, signal.SIGTERM)
    await asyncio.to_thread(stage.let_go)
    assert (await call.future).data == "finished"
    assert await desk.value(misdeeds.pid) == pid


@BOTH
async def test_workers_that_are_being_set_up_go_on(open_desk, stage, portable):
    """The same signal does not end a worker in the middle of its setup."""
    setup = pickle.dumps((deeds.hold, ((stage.began, stage.gate),)))
    desk = open_desk(max_workers=1, spare=False, setup=setup, portable=portable)
    call = desk.begin(misdeeds.pid)
    pid = int(await asyncio.to_thread(stage.wait_until_begun))
    os.kill(pid, signal.SIGTERM)
    await asyncio.to_thread(stage.let_go)
    assert (await call.future).data == pid


@BOTH
async def test_interpreters_that_are_starting_go_on(open_fresh, portable):
    """Nor does it end a process of ours that has not come to its own code yet."""
    desk, before = open_fresh(portable=portable), descendants(os.getpid())
    call = desk.begin(misdeeds.pid)
    started = descendants(os.getpid()) - before
    assert started
    for pid in started:
        os.kill(pid, signal.SIGTERM)
    assert (await call.future).success
    assert desk.pool.numbers.crashed == 0


# --- what the host blocks and ignores ---------------------------------------------------------------------------------


@pytest.fixture
def deaf_host() -> Iterator[None]:
    """This process blocks one signal and ignores another, until the end of the test."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR2, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@BOTH
async def test_programs_start_with_every_signal(open_fresh, deaf_host, portable):
    """What user code starts in a worker neither blocks nor ignores any signal, whatever host and worker do."""
    assert await open_fresh(portable=portable).value(misdeeds.signals_of_child) == (0, 0)


# --- numbers of processes ---------------------------------------------------------------------------------------------


async def test_only_a_number_that_is_still_its_own_is_signalled(monkeypatch):
    """A worker's group is killed before the worker is reaped, when no other process can have its number; not after."""
    was_there: list[bool] = []
    killpg = os.killpg

    def watched(pid: int, signum: int) -> None:
        was_there.append(Path(f"/proc/{pid}").exists())
        killpg(pid, signum)

    monkeypatch.setattr(os, "killpg", watched)
    worker = Spawner().spawn()
    gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    worker.watch(asyncio.get_running_loop(), gone.set_result)
    worker.wire.close()
    assert await gone == 0
    worker.kill()
    assert was_there == [True]
