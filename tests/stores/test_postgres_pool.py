"""How many connections a store on PostgreSQL keeps and opens, as the environment has it."""

import asyncio

import asyncpg
import pytest

from taskyard import UnknownTask, Yard
from taskyard.resources.database import size_database_pool
from taskyard.scheduling.clock import SystemClock
from taskyard.settings import make_store
from taskyard.stores.postgres import PostgresStore

pytestmark = pytest.mark.spec("MGR-11")

PATIENCE_S = 20.0

OURS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'taskyard'"


async def count(conn: asyncpg.Connection, sql: str) -> int:
    found: int = await conn.fetchval(f"SELECT count(*) {sql}")
    return found


async def test_the_environment_bounds_the_pool(postgres_url, monkeypatch):
    """With DB_POOL_SIZE=2 and DB_MAX_OVERFLOW=3, twenty readers share five connections; two stay when they are done."""
    monkeypatch.setenv("DB_POOL_SIZE", "2")
    monkeypatch.setenv("DB_MAX_OVERFLOW", "3")
    conn, theirs = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    async with Yard(postgres_url).client() as yard:
        await theirs.execute("BEGIN; LOCK TABLE taskyard.task")
        reading = [asyncio.create_task(yard.handle(f"task-{n}").record()) for n in range(20)]
        async with asyncio.timeout(PATIENCE_S):
            while await count(conn, f"{OURS} AND wait_event_type = 'Lock'") < 5:
                assert not any(one.done() for one in reading)
        assert await count(conn, f"{OURS} AND wait_event_type = 'Lock'") == 5
        before = await count(conn, OURS)
        await theirs.execute("COMMIT")
        answers = await asyncio.gather(*reading, return_exceptions=True)
        assert {type(answer) for answer in answers} == {UnknownTask}
        async with asyncio.timeout(PATIENCE_S):
            while await count(conn, OURS) > before - 3:
                pass
        assert await count(conn, OURS) == before - 3
    await conn.close()
    await theirs.close()


@pytest.mark.parametrize("environment", ["production", "development"])
def test_a_store_takes_the_sizes_of_this_process(environment, monkeypatch):
    """What the resources say of this process is what its store is made with."""
    for name in ("DB_POOL_SIZE", "DB_MAX_OVERFLOW"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ENVIRONMENT", environment)
    store, pool = make_store("postgresql://nobody@nowhere/none", SystemClock()), size_database_pool()
    assert isinstance(store, PostgresStore)
    assert (store.pool_size, store.max_overflow) == (pool.size, pool.overflow)
