"""The documents of a queue in the order in which it will start."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from taskyard import Yard
from taskyard.application.local import LocalApplication
from taskyard.model.forecast import forecast
from taskyard.model.queue_order import QueueOrderView
from taskyard.queueing import order

PATIENCE_S = 20


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'work.db'}"}
    return urls.get(request.param) or request.getfixturevalue("postgres_url")


async def test_the_tasks_of_a_listing_are_read_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tasks are listed, one query reads the arguments that hide secrets in titles and reasons."""
    yard = Yard(url)

    @yard.consumer
    async def login(password: str) -> None: ...

    async with yard.client():
        for n in range(30):
            task = await yard.submit("login", {"password": f"xyzzy-{n:03}"}, title=f"as xyzzy-{n:03}")
            if n % 2:
                await yard.hold(task.uuid, reason=f"xyzzy-{n:03} is wrong")
        asked: list[str] = []
        for name in ("find", "find_tasks"):
            _count_calls(monkeypatch, yard.store, name, asked)
        shown = await LocalApplication(yard, actor="test").queues.order("default", limit=100)
        assert asked == ["find_tasks"]
        assert [entry.title for entry in (*shown.waiting, *shown.apart)] == ["as ***"] * 30
        assert "xyzzy" not in str(shown)


def _count_calls(monkeypatch: pytest.MonkeyPatch, store: Any, name: str, asked: list[str]) -> None:
    call = getattr(store, name)

    async def counted(*args: Any) -> Any:
        asked.append(name)
        return await call(*args)

    monkeypatch.setattr(store, name, counted)


async def test_a_forecast_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks of the event loop go on while a queue is played forward."""
    has_begun, has_gone_on = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> QueueOrderView:
        has_begun.set()
        assert has_gone_on.wait(PATIENCE_S), "the event loop stands still"
        return forecast(*args, **kwargs)

    monkeypatch.setattr(order, "forecast", slow)
    async with Yard("memory://").client() as yard:
        asking = asyncio.create_task(yard.queue().order())
        async with asyncio.timeout(2 * PATIENCE_S):
            while not asking.done():
                if has_begun.is_set():
                    has_gone_on.set()
                await asyncio.sleep(0)
        assert (await asking).waiting_count == 0
