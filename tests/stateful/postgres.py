"""The same machine with PostgreSQL as the other store."""

from taskyard.ports.store import Store
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.postgres import Databases
from tests.stateful.machine import StoreMachine


def postgres_machine(databases: Databases) -> type[StoreMachine]:
    """A machine that begins every history with an empty database of these, made by `histories.crowded`."""

    class PostgresMachine(StoreMachine):
        name = "PostgreSQL"

        def __init__(self) -> None:
            super().__init__()
            self.url = databases.empty("crowded")

        def open_handle(self) -> Store:
            handle = PostgresStore(self.url, clock=self.clock)
            self.run(handle.open())
            return handle

    return PostgresMachine
