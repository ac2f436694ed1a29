"""The same machine with PostgreSQL as the other store."""

from taskyard.ports.store import Store
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.postgres import UNSEEN, Databases
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

        def check_nothing_is_lost_sight_of(self) -> None:
            assert isinstance(self.home, PostgresStore)
            assert self.run(self.home._db.ask(lambda conn: conn.fetch(UNSEEN))) == []

    return PostgresMachine
