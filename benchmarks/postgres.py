"""One PostgreSQL server for the sides of a scenario, as durable as it is by default; a fresh database for each reading.

The server belongs to the process that compares: it is up before the first side is read and gone after the last.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from benchmarks.reading import Reading
from benchmarks.sides import Side, SideFailed, scratch_folder
from taskyard.testing.postgres import Databases, Server

DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the sides of a scenario find their databases."""

    databases: Databases

    def side(self, name: str, target: str, arguments: dict[str, object], *, template: str | None = None) -> Side:
        """A side that is handed a database of its own as `dsn`: an empty one, or a copy of the one at `template`."""
        return self.side_with(name, target, arguments, templates={"dsn": template})

    def side_with(
        self, name: str, target: str, arguments: dict[str, object], *, templates: Mapping[str, str | None]
    ) -> Side:
        """The same with several databases, by the names under which they are handed over."""
        return DatabaseSide(name, target, arguments, place=self, templates=templates)

    @contextmanager
    def database(self, template: str | None) -> Iterator[str]:
        dsn = self.databases.make(copy_of=template)
        # What the side before left to be written is written now, and not at the cost of this one.
        self.databases.execute("CHECKPOINT")
        yield dsn
        self.databases.drop(dsn)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSide(Side):
    place: Place
    templates: Mapping[str, str | None]

    def read(self) -> Reading:
        with ExitStack() as stack:
            made = {name: stack.enter_context(self.place.database(of)) for name, of in self.templates.items()}
            return Side(self.name, self.target, {**self.arguments, **made}).read()


@contextmanager
def place() -> Iterator[Place]:
    with scratch_folder() as folder:
        server = Server(disk=Path(folder))
        server.start()
        try:
            databases = Databases(server.url)
            databases.run(_check_durability)
            yield Place(databases)
        finally:
            server.stop()


async def _check_durability(database: asyncpg.Connection) -> None:
    for setting, wanted in DURABLE.items():
        found = await database.fetchval(f"SHOW {setting}")
        if found != wanted:
            raise SideFailed(f"the server runs with {setting}={found}, not {wanted}: what it promises is not compared")
