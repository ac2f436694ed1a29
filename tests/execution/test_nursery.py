"""The nursery, which all pools of a process share: what one of them asks for, or does, is not paid by the others."""

import asyncio
import contextlib
import os
import signal
import socket

import pytest

from taskyard.execution.nursery import Nursery
from taskyard.execution.nursery_main import HEAD
from tests.execution import deeds, misdeeds

GARBAGE = HEAD.pack(3, 0) + b"\xff\xff\xff"


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Makes a module that a nursery which starts from now on can find."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, body: str) -> str:
        (tmp_path / f"{name}.py").write_text(body)
        return name

    return write


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_request_that_makes_no_sense(open_fresh):
    """It harms nobody: what runs goes on, and the next worker starts in the same nursery."""
    desk = open_fresh(recycle_after=1)
    await desk.value(misdeeds.pid)
    nursery = desk.pool._starter
    pid = nursery.find_pid()
    nursery._processes[()]._sock.sendall(GARBAGE)
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert nursery.find_pid() == pid


async def test_a_start_that_makes_no_sense(open_fresh):
    """Whoever asked for it hears that it failed; the workers that are there stay."""
    desk = open_fresh()
    pid = await desk.value(misdeeds.pid)
    wire, worker_end = socket.socketpair()
    control, keeper_end = socket.socketpair()
    with wire, control:
        with worker_end, keeper_end:
            fds = [worker_end.fileno(), keeper_end.fileno()]
            socket.send_fds(desk.pool._starter._processes[()]._sock, [HEAD.pack(3, 2) + GARBAGE[-3:]], fds)
        assert await asyncio.to_thread(control.recv, 1) == b""
    assert await desk.value(misdeeds.pid) == pid


# --- preloading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("portable", [False, True], ids=["nursery", "portable"])
@pytest.mark.parametrize("body", ["import no_such_module", "raise SystemExit(3)"], ids=["fails", "exits"])
async def test_a_module_that_cannot_be_preloaded(open_fresh, write_module, body, portable):
    """The pool that asked for it says so, and no other notices."""
    write_module("broken", body)
    innocent = open_fresh()
    nursery = innocent.pool._starter
    pid = await innocent.value(misdeeds.pid) and nursery.find_pid()
    desk = open_fresh(beside=None if portable else innocent, portable=portable, preload=["broken"])
    error = (await desk.ask(abs, 1)).error
    assert error is not None
    assert "the module 'broken' in its preload could not be imported" in error.message
    assert await innocent.value(misdeeds.add, 1, 2) == 3
    assert nursery.find_pid() == pid


DICE = """
import os
state = os.urandom(8)

def seed():
    global state
    state = os.urandom(8)
"""


async def test_workers_throw_dice_of_their_own(open_fresh, write_module, tmp_path):
    """Workers of one nursery do not share the state of NumPy's generator. (A package with its names stands for it.)"""
    (tmp_path / "numpy").mkdir()
    write_module("numpy/__init__", "")
    write_module("numpy/random", DICE)
    desk = open_fresh(recycle_after=1, preload=["numpy.random"])
    states = [await desk.value(eval, "__import__('numpy.random').random.state") for _ in range(3)]
    assert len(set(states)) == 3


async def test_a_module_that_ends_the_nursery(open_fresh, write_module, caplog, stage):
    """It is tried once, and its own pool fails alone: what runs in others goes on."""
    innocent = open_fresh()
    running = innocent.begin(deeds.hold, (stage.began, stage.gate), "unharmed")
    await asyncio.to_thread(stage.wait_until_begun)
    deadly = open_fresh(beside=innocent, preload=(write_module("deadly", "import os\nos._exit(3)"),))
    error = (await deadly.ask(abs, 1)).error
    assert error is not None
    assert error.message == "a worker process exited with code 3 before it was ready (3 starts in a row have failed)"
    await asyncio.to_thread(stage.let_go)
    assert (await running.future).data == "unharmed"
    assert [record.args for record in caplog.records if "not preloaded" in record.message] == [("deadly",)]


async def test_a_module_that_hangs_the_nursery(open_fresh, write_module, monkeypatch):
    """A nursery that does not answer is replaced, without what it hung on."""
    for name in ("NURSERY_PATIENCE_S", "PRELOAD_S"):
        monkeypatch.setattr(f"taskyard.execution.nursery.{name}", 0.05)
    innocent = open_fresh()
    stuck = open_fresh(beside=innocent, load_s=0.5, preload=(write_module("stuck", "import time\ntime.sleep(600)"),))
    error = (await stuck.ask(abs, 1)).error
    assert error is not None
    assert error.message == "a worker process did not start within 0.5 s (2 starts in a row have failed)"
    assert await innocent.value(misdeeds.add, 1, 2) == 3


# --- a nursery that is stopped ----------------------------------------------------------------------------------------


async def test_a_start_that_a_stopped_nursery_does_not_answer(open_fresh):
    """Its time is limited, and the nursery is made to go on: the call is done in the end."""
    desk = open_fresh(load_s=0.5, recycle_after=1)
    await desk.value(misdeeds.pid)
    os.kill(desk.pool._starter.find_pid(), signal.SIGSTOP)
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_a_shutdown_with_a_stopped_nursery(open_fresh):
    """It ends, though a worker was on its way."""
    desk = open_fresh(term_grace_s=0.05, recycle_after=1)
    await desk.value(misdeeds.pid)
    os.kill(desk.pool._starter.find_pid(), signal.SIGSTOP)
    call = desk.begin(misdeeds.pid)
    async with asyncio.timeout(5):
        await desk.pool.shutdown()
    assert (await call.future).error is not None


def test_a_stopped_nursery_is_closed():
    """At the end of the interpreter nobody waits for one that is stopped."""
    nursery = Nursery()
    worker = nursery.spawn()
    home = nursery._processes[()]
    os.kill(home.pid, signal.SIGSTOP)
    nursery.close(patience_s=5)
    assert home._process.returncode == 0
    for sock in (worker.wire, worker._control):
        sock.close()


def test_a_nursery_that_takes_no_request_does_not_hold_up_the_host():
    """A start is refused after a second, instead of blocking the event loop that asks for it."""
    nursery = Nursery()
    worker = nursery.spawn()
    home = nursery._processes[()]
    os.kill(home.pid, signal.SIGSTOP)
    with contextlib.suppress(BlockingIOError):
        home._sock.send(HEAD.pack(1 << 31, 0))
        while True:
            home._sock.send(bytes(1000), socket.MSG_DONTWAIT)
    with pytest.raises(TimeoutError, match="does not answer"):
        nursery.spawn()
    nursery.close()
    for sock in (worker.wire, worker._control):
        sock.close()
