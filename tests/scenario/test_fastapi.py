"""A yard in a web application's lifespan."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from taskyard import NotOpen, Yard


@pytest.mark.spec("SCH-22")
async def test_a_yard_lives_as_long_as_the_application(url):
    """Two lines, a yard and `FastAPI(lifespan=yard.lifespan)`, run tasks from requests until the server stops."""
    yard = Yard(url)
    app = FastAPI(lifespan=yard.lifespan)

    @yard.consumer
    async def greet(name: str) -> str:
        return f"hello {name}"

    @app.post("/greet/{name}")
    async def post(name: str) -> Any:
        handle = await greet.submit(name)
        return {"uuid": handle.uuid, "result": await handle.result(timeout_s=10)}

    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        port = sock.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
            answers = await asyncio.gather(*(client.post(f"/greet/n{n}") for n in range(5)))
        assert [answer.json()["result"] for answer in answers] == [f"hello n{n}" for n in range(5)]
        server.should_exit = True
        await serving
    with pytest.raises(NotOpen):
        await greet.submit("too late")
