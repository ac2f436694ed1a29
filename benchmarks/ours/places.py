"""Where a yard of ours keeps its tasks, and what is found there afterwards."""

from pathlib import Path

import apsw
import asyncpg

from taskyard.model.state import TaskState


def url_of(folder: Path, dsn: str | None) -> str:
    """The database that the side was handed, or a file of its own."""
    return dsn or f"sqlite:///{folder / 'ours.db'}"


async def persisted(url: str, *states: TaskState) -> int:
    """Counted in the database after the yard let go of it, row by row: only what was committed."""
    names = [str(state) for state in states]
    if url.startswith("sqlite:///"):
        file = apsw.Connection(url.removeprefix("sqlite:///"), flags=apsw.SQLITE_OPEN_READONLY)
        marks = ", ".join("?" for _ in names)
        return int(file.execute(f"SELECT count(*) FROM task WHERE state IN ({marks})", names).get)
    return await _persisted_in_postgres(url, names)


async def _persisted_in_postgres(dsn: str, states: list[str]) -> int:
    database = await asyncpg.connect(dsn)
    held = await database.fetchval(
        "SELECT (SELECT count(*) FROM taskyard.task WHERE state = ANY ($1))"
        " + (SELECT count(*) FROM taskyard.ended WHERE state = ANY ($1))",
        states,
    )
    await database.close()
    return int(held)
