"""Every store, held to the one contract."""

from pathlib import Path

from taskyard.ports.clock import Clock
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.contract import DurableStoreContract, PromptStoreContract


class TestMemoryStore(PromptStoreContract):
    def make_store(self, clock: Clock, folder: Path) -> Store:
        return MemoryStore(clock)


class TestSqliteStore(DurableStoreContract):
    def make_store(self, clock: Clock, folder: Path) -> Store:
        return SqliteStore(folder / "work.db", clock=clock)
