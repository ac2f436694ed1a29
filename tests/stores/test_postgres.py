"""What only the store on PostgreSQL has to keep: a server is far away, and what was sent to it may arrive late."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from taskyard.model.state import TaskState
from taskyard.ports.store import TaskFilter
from taskyard.scheduling.clock import SystemClock
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.samples import a_node, a_record, an_add, room
from tests.torture.postgres.wires import Proxy

NODE = a_node("one")
LATE_S = 0.5


@pytest.fixture
async def wire(postgres_url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(urlsplit(postgres_url).port or 0)
    yield proxy
    proxy.close()


@pytest.fixture
async def store(postgres_url: str, wire: Proxy) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(wire.address(postgres_url), clock=SystemClock())
    await store.open()
    await store.join(NODE)
    yield store
    await store.close()


async def test_a_turn_that_was_given_up_claims_nothing_later(store: PostgresStore, wire: Proxy) -> None:
    """What a turn claims that reaches the server after it was given up is seen when it is looked for, or never claimed:
    nobody would run it."""
    await store.turn(NODE.incarnation, adds=[an_add(a_record(), a_record())])
    wire.slow(LATE_S)
    turn = asyncio.create_task(store.turn(NODE.incarnation, demand=room(2)))
    while not wire.held:  # noqa: ASYNC110  # it is in another thread
        await asyncio.sleep(0.005)
    wire.mend()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    seen = await store.list_tasks(TaskFilter(states=(TaskState.RUNNING,)))
    await asyncio.sleep(2 * LATE_S)  # by now it would be there
    assert await store.list_tasks(TaskFilter(states=(TaskState.RUNNING,))) == seen
