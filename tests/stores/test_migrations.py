"""A SQLite store of an older version is brought up to date when it is opened, with all that is in it."""

from pathlib import Path
from typing import Any

import apsw
import pytest

from taskyard.model.limits import Demand
from taskyard.model.state import TaskState
from taskyard.model.task import new_uuid
from taskyard.ports.clock import SystemClock
from taskyard.stores.migrations import Migration, list_migrations
from taskyard.stores.sqlite import SqliteStore, place
from taskyard.stores.sqlite.place import connect, migrate

BASELINE = list_migrations("sqlite")
NEXT = Migration(len(BASELINE) + 1, f"{len(BASELINE) + 1:04}_colour", "ALTER TABLE task ADD COLUMN colour TEXT;")
"""A migration as the next version may bring it."""


def make(path: Path) -> None:
    """A store of this version, with one task queued."""
    conn = connect(path, synchronous="FULL", vfs=None, write=True)
    migrate(conn, path)
    conn.execute(
        "INSERT INTO task (id, uuid, consumer, queue, args, state, priority, position, is_parked, due_at, created_at, "
        "updated_at) VALUES (1, ?, 'work', 'default', '{}', 'queued', 1, 1, 0, 0, 0, 0)",
        (new_uuid(),),
    )
    conn.execute("INSERT INTO state_count VALUES ('default', 'work', 'queued', 1, 1)")
    conn.execute("INSERT INTO event VALUES (1, 1, 1, '[]')")
    conn.close()


def use_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this program is the next version."""
    monkeypatch.setattr(place, "list_migrations", lambda _: [*BASELINE, NEXT])


def schema(path: Path) -> list[Any]:
    """Objects without comments and with columns in the form of `table_info`: ALTER TABLE writes its own text."""
    conn = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found: list[Any] = []
    for kind, name, sql in conn.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall():
        columns = conn.execute(f"PRAGMA table_info({name})").fetchall()
        found.append((kind, name, columns if kind == "table" else sql))
    conn.close()
    return found


def test_the_schema_is_that_of_a_new_store(tmp_path, monkeypatch):
    """However it came about, one version has one schema."""
    make(tmp_path / "old.db")
    use_next_version(monkeypatch)
    for path in (tmp_path / "old.db", tmp_path / "new.db"):
        conn = connect(path, synchronous="FULL", vfs=None, write=True)
        migrate(conn, path)
        assert conn.execute("PRAGMA user_version").get == NEXT.number
        conn.close()
    assert schema(tmp_path / "old.db") == schema(tmp_path / "new.db")


async def test_its_tasks_go_on(tmp_path, monkeypatch):
    """What was queued is counted and can be claimed."""
    make(tmp_path / "old.db")
    use_next_version(monkeypatch)
    store = SqliteStore(tmp_path / "old.db", clock=SystemClock())
    await store.open()
    assert await store.count() == {("default", TaskState.QUEUED): 1}
    assert len((await store.turn("node", demand=Demand(5, {"work": 5}))).claims) == 1
    await store.close()
