"""Where a yard of ours keeps its tasks, and what is found there afterwards."""

import os
import shutil
from pathlib import Path

import apsw
import asyncpg

from taskyard.model.state import TaskState

FILE = "sqlite:///"


def url_of(folder: Path, dsn: str | None) -> str:
    """The database that the side was handed, or a file of its own."""
    return dsn or f"{FILE}{folder / 'ours.db'}"


def own_copy(folder: Path, dsn: str) -> str:
    """What the side may change: of a file that others read as well, a copy; a database it was handed is its own."""
    if not dsn.startswith(FILE):
        return dsn
    file = Path(dsn.removeprefix(FILE))
    copy = Path(shutil.copy(file, folder / file.name))
    with copy.open("rb") as written:
        os.fsync(written.fileno())  # now, and not at the cost of the first commits
    return f"{FILE}{copy}"


async def persisted(url: str, *states: TaskState) -> int:
    """Counted in the database after the yard let go of it, row by row: only what was committed."""
    names = [str(state) for state in states]
    if url.startswith(FILE):
        file = apsw.Connection(url.removeprefix(FILE), flags=apsw.SQLITE_OPEN_READONLY)
        marks = ", ".join("?" for _ in names)
        return int(file.execute(f"SELECT count(*) FROM task WHERE state IN ({marks})", names).get)
    return await _persisted_in_postgres(url, names)


async def _persisted_in_postgres(dsn: str, states: list[str]) -> int:
    database = await asyncpg.connect(dsn)
    held = await database.fetchval(
        "SELECT (SELECT count(*) FROM taskyard.task WHERE state = ANY ($1))"
        " + (SELECT count(*) FROM taskyard.finished WHERE state = ANY ($1))",
        states,
    )
    await database.close()
    return int(held)
