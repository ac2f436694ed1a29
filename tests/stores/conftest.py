"""A PostgreSQL store that two nodes have joined, and a connection beside it."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from taskyard.stores.postgres import PostgresStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(postgres_url: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    await store.join(a_node("a"))
    await store.join(a_node("b"))
    yield store
    await store.close()


@pytest.fixture
async def conn(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """On which a turn stands still where the test wants it to."""
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()
