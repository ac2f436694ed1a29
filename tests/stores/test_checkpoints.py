"""The log is copied back beside the writer, and begins anew before it gets long."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import apsw
import pytest

from taskyard.stores.sqlite import checkpoints
from taskyard.stores.sqlite.checkpoints import EVERY_PAGES, LONG_PAGES, Checkpoints
from taskyard.stores.sqlite.place import connect

PAGE = 4096


class File:
    """A database with a writer whose log is looked after."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "work.db"
        self.conn = connect(self.path, synchronous="OFF", vfs=None, write=True)
        self.conn.execute("CREATE TABLE blob (body)")
        self.copier = connect(self.path, synchronous="OFF", vfs=None, write=False)
        self.checkpoints = Checkpoints(self.conn, self.copier)

    def write(self, pages: int, *, per_commit: int = 33, pausing: bool = False) -> None:
        """About as many pages, with what the writer does around each commit. `pausing` lets every copy finish before
        the next commit."""
        row = b"x" * ((per_commit - 3) * PAGE)
        for _ in range(-(-pages // per_commit)):
            self.conn.execute("INSERT INTO blob VALUES (?)", (row,))
            if self.checkpoints.is_long:
                self.checkpoints.copy_whole()
            self.checkpoints.look()
            if pausing and self.checkpoints._copying is not None:
                self.checkpoints._copying.result(timeout=10)

    def log_pages(self) -> int:
        return self.path.with_name("work.db-wal").stat().st_size // PAGE

    def close(self) -> None:
        self.checkpoints.close()
        self.conn.close()


@pytest.fixture
def file(tmp_path):
    file = File(tmp_path)
    yield file
    file.close()


def test_the_copy_is_made_by_another_thread(file, monkeypatch):
    """A commit that makes the log too long does not copy it: whoever waits for that commit would wait for the copy."""
    copied_by: list[str] = []
    monkeypatch.setattr(checkpoints, "_copy", lambda conn: copied_by.append(threading.current_thread().name))
    file.write(EVERY_PAGES - 200, pausing=True)
    assert copied_by == []
    file.write(300, pausing=True)
    assert [name.rpartition("_")[0] for name in copied_by] == ["taskyard-checkpoint"]


def test_a_quiet_log_begins_anew(file):
    """A copy that nobody outruns reaches the end, and the next commit starts the log from its beginning."""
    file.write(10 * EVERY_PAGES, pausing=True)
    assert EVERY_PAGES <= file.log_pages() <= 1.1 * EVERY_PAGES


@pytest.mark.parametrize("per_commit", [33, 1500])
def test_the_writer_copies_when_copies_beside_it_never_reach_the_end(file, per_commit, monkeypatch):
    """Under a load without a pause the log stays bounded, on a slow disk and with large commits too."""
    copy = checkpoints._copy

    def slow(conn: apsw.Connection) -> bool:
        if conn is file.copier:
            time.sleep(0.05)
        return copy(conn)

    monkeypatch.setattr(checkpoints, "_copy", slow)
    file.write(6 * LONG_PAGES, per_commit=per_commit)
    assert LONG_PAGES <= file.log_pages() <= LONG_PAGES + EVERY_PAGES + per_commit


def test_a_reader_of_an_old_state_keeps_the_writer_from_trying_at_every_commit(file, monkeypatch):
    """The log cannot begin anew while somebody reads what it replaced; the next try comes when it has grown again."""
    tries: list[bool] = []
    copy = checkpoints._copy

    def counted(conn: apsw.Connection) -> bool:
        is_whole = copy(conn)
        if conn is file.conn:
            tries.append(is_whole)
        return is_whole

    monkeypatch.setattr(checkpoints, "_copy", counted)
    reader = connect(file.path, synchronous="OFF", vfs=None, write=False)
    file.write(30)
    reader.execute("BEGIN; SELECT count(*) FROM blob").fetchall()
    file.write(LONG_PAGES + 3 * EVERY_PAGES)
    assert set(tries) == {False}
    assert 3 <= len(tries) <= 5
    reader.close()
    file.write(3 * EVERY_PAGES)
    assert tries[-1]


def test_a_copy_that_cannot_be_started_harms_no_commit(file):
    """A commit that has happened is never reported as failed, whatever becomes of the copy."""
    file.checkpoints._thread.shutdown()
    file.write(2 * LONG_PAGES)
    assert file.log_pages() <= LONG_PAGES + EVERY_PAGES + 33


@pytest.mark.timeout(60)
async def test_two_processes_that_never_pause_keep_the_log_short(tmp_path):
    """Each copies with the write turn in its hands, so that the other cannot outrun it."""
    writers = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY_WRITER, str(tmp_path / "work.db"))
        for _ in range(2)
    ]
    codes = [await writer.wait() for writer in writers]
    assert codes == [0, 0]
    longest = max(int(file.read_text()) for file in tmp_path.glob("longest-*"))
    assert LONG_PAGES <= longest <= LONG_PAGES + 3 * EVERY_PAGES


BUSY_WRITER = """
import asyncio, os, sys
from datetime import UTC, datetime
from pathlib import Path
from taskyard.model.task import TaskRecord, new_uuid
from taskyard.ports.store import Add
from taskyard.scheduling.clock import SystemClock
from taskyard.stores.sqlite import SqliteStore

async def main(path):
    store = SqliteStore(path, clock=SystemClock(), synchronous="OFF")
    await store.open()
    longest = 0
    for _ in range(250):
        now = datetime.now(UTC)
        records = [TaskRecord(new_uuid(), "work", now, now, now, args='"' + "x" * 4000 + '"') for _ in range(40)]
        await store.turn("node", adds=[Add(records)])
        longest = max(longest, path.with_name("work.db-wal").stat().st_size // 4096)
    path.with_name(f"longest-{os.getpid()}").write_text(str(longest))
    await store.close()

asyncio.run(main(Path(sys.argv[1])))
"""
