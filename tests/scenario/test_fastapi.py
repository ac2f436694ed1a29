"""A yard in a web application's lifespan."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from taskyard import ExecutorService, Task, TaskFilter, TaskRun, TaskState, Yard
from taskyard.devices import GameAccount, SimulatedDevice
from taskyard.errors import NotOpen
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, which a real server runs until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        base_url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=20) as client:
            yield client
        server.should_exit = True
        await serving


def greeter(url: str | Store) -> Yard:
    yard = Yard(url)

    @yard.consumer
    async def greet(name: str) -> str:
        return f"hello {name}"

    return yard


@pytest.mark.spec("SCH-22")
async def test_a_web_application_submits_and_a_worker_runs(file_url):
    """Two lines, a yard and `FastAPI(lifespan=yard.lifespan)`, make a producer: it runs no task, and waits for the
    results of a worker."""
    yard = greeter(file_url)
    app = FastAPI(lifespan=yard.lifespan)

    @app.post("/greet/{name}")
    async def post(name: str) -> Any:
        return (await yard.submit("greet", {"name": name})).uuid

    @app.get("/greetings/{uuid}")
    async def get(uuid: str) -> Any:
        return await yard.handle(uuid).result(timeout_s=10)

    async with served(app) as client:
        uuids = [(await client.post(f"/greet/n{n}")).json() for n in range(3)]
        assert [await yard.handle(uuid).state() for uuid in uuids] == [TaskState.QUEUED] * 3
        assert await yard.store.nodes() == []
        async with greeter(file_url):
            answers = await asyncio.gather(*(client.get(f"/greetings/{uuid}") for uuid in uuids))
        assert [answer.json() for answer in answers] == ["hello n0", "hello n1", "hello n2"]
    with pytest.raises(NotOpen):
        await yard.submit("greet", {"name": "too late"})


@pytest.mark.spec("SCH-22")
async def test_a_web_application_runs_tasks_if_it_says_so(url):
    """With `worker_lifespan`, or on a store that no other process can open, the application runs its tasks itself."""
    yard = greeter(url)
    app = FastAPI(lifespan=yard.lifespan if url == "memory://" else yard.worker_lifespan)

    @app.post("/greet/{name}")
    async def post(name: str) -> Any:
        handle = await yard.submit("greet", {"name": name})
        return await handle.result(timeout_s=10)

    async with served(app) as client:
        answers = await asyncio.gather(*(client.post(f"/greet/n{n}") for n in range(5)))
    assert [answer.json() for answer in answers] == [f"hello n{n}" for n in range(5)]


async def test_a_web_application_runs_a_farm():
    """`FastAPI(lifespan=service.lifespan)` starts and stops an `ExecutorService`, and a route may return its runs."""
    service = ExecutorService(devices=[SimulatedDevice(1, name="emu-1")])

    @service.consumer
    async def daily(account: GameAccount) -> None: ...

    app = FastAPI(lifespan=service.lifespan)

    @app.post("/daily/{account}")
    async def post(account: int) -> bool:
        return await service.enqueue(Task(source="daily"), GameAccount(account))

    @app.get("/runs")
    async def get() -> list[TaskRun]:
        return await service.task_runs()

    async with served(app) as client:
        assert (await client.post("/daily/7")).json() is True
        ((_, task),) = await service.yard.store.list_ids(TaskFilter(), limit=2)
        await service.yard.handle(task).result(timeout_s=20)
        (run,) = (await client.get("/runs")).json()
        assert (run["account_id"], run["worker_id"], run["status"]) == (7, "emu-1", "completed")
        assert run["start"] <= run["finished_at"]
    assert not service.yard.is_open


async def test_a_store_object_in_memory_is_served_by_its_application():
    """A store that was passed as an object, without a path or an address, lives in this process."""
    yard = greeter(MemoryStore(SystemClock()))
    async with yard.lifespan(None):
        assert await (await yard.submit("greet", {"name": "ann"})).result(timeout_s=10) == "hello ann"
