"""A store that an older version made is brought up to date when it is opened, with all that is in it."""

from pathlib import Path
from typing import Any

import apsw
import pytest

from taskyard.model.limits import Demand
from taskyard.model.state import TaskState
from taskyard.model.task import new_uuid
from taskyard.ports.clock import SystemClock
from taskyard.stores.migrate import migrations
from taskyard.stores.sqlite import SqliteStore
from taskyard.stores.sqlite.place import APPLICATION_ID, connect, migrate

STEPS = migrations("sqlite")
OLD = [number for number, _ in STEPS[:-1]]


def make(path: Path, version: int) -> None:
    """A store as that version left it, with one task queued."""
    conn = apsw.Connection(str(path))
    for number, sql in STEPS:
        if number <= version:
            conn.execute(sql)
    conn.execute(f"PRAGMA user_version = {version}; PRAGMA application_id = {APPLICATION_ID}")
    conn.execute(
        "INSERT INTO task (id, uuid, source, queue, args, state, priority, position, parked, due_at, created_at, "
        "updated_at) VALUES (1, ?, 'work', 'default', '{}', 'queued', 1, 1, 0, 0, 0, 0)",
        (new_uuid(),),
    )
    tally = {"queue": "default", "source": "work", "state": "queued", "n": 1} | ({"priority": 1} if version > 5 else {})
    marks = ", ".join(["?"] * len(tally))
    conn.execute(f"INSERT INTO tally ({', '.join(tally)}) VALUES ({marks})", tuple(tally.values()))
    conn.execute("INSERT INTO event VALUES (1, 1, 1, '[]')")
    conn.close()


def schema(path: Path) -> list[Any]:
    conn = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found = conn.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
    conn.close()
    return found


@pytest.mark.parametrize("version", OLD)
def test_the_schema_is_that_of_a_new_store(version, tmp_path):
    """However it came about, one version has one schema."""
    for path, start in ((tmp_path / "old.db", version), (tmp_path / "new.db", 0)):
        if start:
            make(path, start)
        conn = connect(path, synchronous="FULL", vfs=None, write=True)
        migrate(conn, path)
        assert conn.execute("PRAGMA user_version").get == STEPS[-1][0]
        conn.close()
    assert schema(tmp_path / "old.db") == schema(tmp_path / "new.db")


@pytest.mark.parametrize("version", OLD)
async def test_its_tasks_go_on(version, tmp_path):
    """What was queued is counted and can be claimed."""
    make(tmp_path / "old.db", version)
    store = SqliteStore(tmp_path / "old.db", clock=SystemClock())
    await store.open()
    assert await store.count() == {("default", TaskState.QUEUED): 1}
    assert len((await store.turn("node", demand=Demand(5, {"work": 5}))).claims) == 1
    await store.close()
