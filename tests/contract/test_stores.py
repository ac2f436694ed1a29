"""Every store, held to the one contract."""

from pathlib import Path

import pytest

from taskyard.ports.clock import Clock
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.contract import DurableStoreContract, PromptStoreContract, ScheduleContract, TiesContract


class TestMemoryStore(PromptStoreContract, TiesContract, ScheduleContract):
    def make_store(self, clock: Clock, folder: Path) -> Store:
        return MemoryStore(clock)


class TestSqliteStore(DurableStoreContract, TiesContract, ScheduleContract):
    def make_store(self, clock: Clock, folder: Path) -> Store:
        return SqliteStore(folder / "work.db", clock=clock)


class TestPostgresStore(DurableStoreContract, TiesContract, ScheduleContract):
    @pytest.fixture(autouse=True)
    def database(self, postgres_url: str) -> None:
        self.url = postgres_url

    def make_store(self, clock: Clock, folder: Path) -> Store:
        return PostgresStore(self.url, clock=clock)
