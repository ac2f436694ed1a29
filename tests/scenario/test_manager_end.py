"""`ExecutorManager`: its shutdown, and its life in an application."""

import asyncio
import logging
import os
import re
import threading
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request

from taskyard import get_executor_manager
from taskyard.futures import ManagerSettings
from taskyard.manager import ManagerClosed
from tests.execution import deeds
from tests.execution.census import is_alive
from tests.scenario.managers import SMALL, WAYS, begin
from tests.scenario.processes import run_python

# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("MGR-09")
async def test_a_shutdown_returns_when_the_work_is_done(stage, caplog):
    """A shutdown ends with the last call, long before its timeout, and the loop goes on meanwhile; a new manager can be
    made as soon as it begins."""
    caplog.set_level(logging.INFO)
    manager = get_executor_manager(SMALL)
    held, pid = await begin(manager, stage)
    io = asyncio.create_task(manager.run_io_intensive(int))
    await asyncio.sleep(0)
    ending = asyncio.create_task(manager.shutdown(timeout=3600))
    await asyncio.sleep(0)
    assert not ending.done()
    for run in (manager.run_cpu_intensive, manager.run_io_intensive):
        with pytest.raises(RuntimeError, match=re.escape("shut down; get_executor_manager() makes a new one")):
            await run(int)
    async with get_executor_manager(SMALL) as meanwhile:  # as they were told
        assert meanwhile is not manager
        assert await meanwhile.run_io_intensive(int) == 0
    assert not ending.done()
    await asyncio.to_thread(stage.let_go)  # the loop is free to do this
    await ending
    assert (await held, await io) == ("held", 0)
    assert not is_alive(pid)
    with pytest.raises(RuntimeError):
        await manager.run_cpu_intensive(int)
    lines = [record.getMessage() for record in caplog.records if record.name == "taskyard"]
    assert len(lines) >= 3
    assert all(line.startswith("[ExecutorManager]") for line in lines)
    async with get_executor_manager(SMALL) as other:
        assert other is not manager
        assert await other.run_cpu_intensive(deeds.echo, 1) == 1


@pytest.mark.spec("MGR-09")
@pytest.mark.parametrize("timeout", ["x", None, True, -1, float("nan"), float("inf")], ids=str)
async def test_a_timeout_that_makes_no_sense(timeout):
    """It is refused with what is allowed, and the manager goes on."""
    async with get_executor_manager(SMALL) as manager:
        with pytest.raises((TypeError, ValueError), match="timeout must be "):
            await manager.shutdown(timeout=timeout)
        assert await manager.run_io_intensive(int) == 0


@WAYS
@pytest.mark.spec("MGR-09")
async def test_a_shutdown_forces_the_rest(stage, caplog, portable):
    """At the deadline what runs in processes is killed, what waits is dropped, and threads are left behind; all of
    their callers are answered, except those of threads that go on."""
    manager = get_executor_manager(ManagerSettings(cpu_workers=1, io_workers=1, portable=portable))
    held, pid = await begin(manager, stage)
    waiting = asyncio.create_task(manager.run_cpu_intensive(deeds.echo))
    gate = threading.Event()
    in_thread = asyncio.create_task(manager.run_io_intensive(gate.wait))
    thread_waiting = asyncio.create_task(manager.run_io_intensive(int))
    await asyncio.sleep(0)
    await manager.shutdown(timeout=0.05)
    assert not is_alive(pid)
    with pytest.raises(BrokenProcessPool, match=r"its manager was shut down and could wait 0\.05 s only"):
        await held
    for dropped in (waiting, thread_waiting):
        with pytest.raises(ManagerClosed):
            await dropped
    assert not in_thread.done()
    assert "[ExecutorManager] 1 threads are left behind" in caplog.text
    gate.set()
    assert await in_thread


STUCK = """
import asyncio, threading, time
from taskyard import get_executor_manager
async def main():
    manager = get_executor_manager()
    begun = threading.Event()
    task = asyncio.create_task(manager.run_io_intensive(lambda: (begun.set(), time.sleep(3600))))
    await asyncio.sleep(0)
    begun.wait()
    await manager.shutdown(timeout=0)
    task.cancel()
asyncio.run(main())
print("ended")
"""


@pytest.mark.spec("MGR-09")
def test_a_stuck_thread_does_not_hold_up_the_process():
    """After a forced shutdown the process can end, whatever its threads do."""
    assert run_python(STUCK) == "ended\n"


async def test_shutting_down_twice(manager):
    """Two at once, and one afterwards, all return, and the manager is closed."""
    await manager.run_cpu_intensive(deeds.echo)
    await asyncio.gather(manager.shutdown(), manager.shutdown())
    await manager.shutdown()
    assert manager.numbers.cpu_executor.workers == 0
    with pytest.raises(ManagerClosed):
        await manager.run_cpu_intensive(deeds.echo)


async def test_a_forked_child_has_a_manager_of_its_own(manager):
    """In a forked child asking for the manager makes a new one; the parent's goes on."""
    assert await manager.run_cpu_intensive(deeds.echo, 1) == 1
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if get_executor_manager(SMALL) is not manager else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0) == (child, 0)
    assert await manager.run_cpu_intensive(deeds.echo, 2) == 2


@pytest.mark.spec("MGR-14")
async def test_in_the_lifespan_of_an_application():
    """A FastAPI application opens the manager with itself, uses it in requests, and shuts it down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        async with get_executor_manager(SMALL) as app.state.executor_manager:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/power/{n}")
    async def power(n: int, request: Request) -> dict[str, int]:
        return {"power": await request.app.state.executor_manager.run_cpu_intensive(pow, 2, n)}

    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://example") as client:
            answers = await asyncio.gather(*(client.get(f"/power/{n}") for n in range(8)))
        assert [answer.json()["power"] for answer in answers] == [2**n for n in range(8)]
    with pytest.raises(RuntimeError):
        await app.state.executor_manager.run_cpu_intensive(pow, 2, 2)
