"""The same machine with a second memory store: both are held against the rules, and against each other."""

from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from tests.stateful.machine import StoreMachine


class MemoryMachine(StoreMachine):
    """What is in memory does not outlive its store, so that all handles are one."""

    name = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.second = MemoryStore(self.clock)

    def open_handle(self) -> Store:
        self.run(self.second.open())
        return self.second
