"""Every store, held to the one contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from taskyard.ports.clock import Clock
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.contract import (
    DeviceContract,
    DurableDeviceContract,
    DurableStoreContract,
    PromptStoreContract,
    ScheduleContract,
    TiesContract,
)
from taskyard.testing.postgres import UNSEEN

COUNTED = "SELECT state, sum(n)::bigint AS n FROM taskyard.state_count WHERE queue = '' GROUP BY state"


class TestMemoryStore(PromptStoreContract, TiesContract, ScheduleContract, DeviceContract):
    def make_store(self, clock: Clock, folder: Path) -> Store:
        return MemoryStore(clock)


class TestSqliteStore(DurableStoreContract, TiesContract, ScheduleContract, DurableDeviceContract):
    def make_store(self, clock: Clock, folder: Path) -> Store:
        return SqliteStore(folder / "work.db", clock=clock)


class TestPostgresStore(DurableStoreContract, TiesContract, ScheduleContract, DurableDeviceContract):
    @pytest.fixture(autouse=True)
    async def database(self, postgres_url: str) -> AsyncIterator[None]:
        """Whatever a test did, what was counted is what there is, and claims come across all that may start."""
        self.url = postgres_url
        yield
        conn = await asyncpg.connect(postgres_url)
        counted: dict[str, int] = {row["state"]: row["n"] for row in await conn.fetch(COUNTED)}
        open_edges = await conn.fetchval("SELECT count(*) FROM taskyard.dependency WHERE NOT done")
        untold_ends = await conn.fetchval("SELECT count(*) FROM taskyard.pending_release")
        unseen = await conn.fetch(UNSEEN)
        await conn.close()
        assert (counted.get("waiting", 0), counted.get("telling", 0)) == (open_edges, untold_ends)
        assert unseen == []

    def make_store(self, clock: Clock, folder: Path) -> Store:
        return PostgresStore(self.url, clock=clock)
