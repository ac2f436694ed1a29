"""The log is copied back between two transactions, and begins anew before it gets long."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

from taskyard.model.task import TaskRecord, new_uuid
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add
from taskyard.stores.sqlite import SqliteStore
from taskyard.stores.sqlite.checkpoints import LONG_PAGES, WORTH_PAGES, Checkpoints
from taskyard.stores.sqlite.place import connect

PAGE = 4096


class File:
    """A database with a writer whose log is looked after."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "work.db"
        self.conn = connect(self.path, synchronous="OFF", vfs=None, write=True)
        self.conn.execute("CREATE TABLE blob (body)")
        self.checkpoints = Checkpoints(self.conn)
        self.copies = 0

    def write(self, pages: int, *, per_commit: int = 33) -> None:
        """About as many pages, with what the writer does after each commit."""
        row = b"x" * ((per_commit - 3) * PAGE)
        for _ in range(-(-pages // per_commit)):
            self.conn.execute("INSERT INTO blob VALUES (?)", (row,))
            if self.checkpoints.is_long:
                self.copy()

    def copy(self) -> None:
        self.checkpoints.copy()
        self.copies += 1

    def log_pages(self) -> int:
        return log_pages(self.path)


def log_pages(path: Path) -> int:
    return path.with_name(path.name + "-wal").stat().st_size // PAGE


@pytest.fixture
def file(tmp_path):
    file = File(tmp_path)
    yield file
    file.conn.close()


@pytest.mark.parametrize("per_commit", [33, 1500])
def test_a_log_that_never_rests_stays_bounded(file, per_commit):
    """Copied when it is long, it begins anew with the next commit."""
    file.write(6 * LONG_PAGES, per_commit=per_commit)
    assert LONG_PAGES <= file.log_pages() <= 1.01 * LONG_PAGES + per_commit
    assert 4 <= file.copies <= 6


def test_a_quiet_moment_is_used_when_it_is_worth_it(file):
    """A short log is left alone; one of some length is copied, and the next commit begins it anew."""
    file.write(WORTH_PAGES - 100)
    assert file.checkpoints.quiet_s is None
    file.write(200)
    assert file.checkpoints.quiet_s is not None
    file.copy()
    assert file.checkpoints.quiet_s is None
    before = file.log_pages()
    file.write(WORTH_PAGES // 2)
    assert file.log_pages() == before


def test_a_reader_of_an_old_state_keeps_the_writer_from_trying_at_every_commit(file):
    """The log cannot begin anew while somebody reads what it replaced; the next try comes when it has grown again."""
    reader = connect(file.path, synchronous="OFF", vfs=None, write=False)
    file.write(30)
    reader.execute("BEGIN; SELECT count(*) FROM blob").fetchall()
    file.write(3 * LONG_PAGES)
    assert 2 <= file.copies <= 3
    assert file.log_pages() >= 2.9 * LONG_PAGES
    reader.close()
    file.write(2 * LONG_PAGES)
    assert file.checkpoints._pages <= LONG_PAGES


async def test_the_writer_copies_when_nothing_is_asked_of_it(tmp_path):
    """Of a store, without anybody doing anything: the log has been copied to its end, and begins anew."""
    store = SqliteStore(tmp_path / "work.db", clock=SystemClock(), synchronous="OFF")
    await store.open()
    for _ in range(40):
        await store.turn("node", adds=[Add([a_large_record() for _ in range(30)])])
    before = log_pages(store.path)
    assert before >= WORTH_PAGES
    async with asyncio.timeout(10):
        while checkpoints_of(store).quiet_s is not None:  # noqa: ASYNC110 -- nothing tells of a copy
            await asyncio.sleep(0.005)
    await store.turn("node", adds=[Add([a_large_record()])])
    assert checkpoints_of(store)._pages < 100
    await store.close()


async def test_a_copy_that_fails_harms_nobody(tmp_path, monkeypatch):
    """Neither the commit before it nor the one after it."""
    monkeypatch.setattr("taskyard.stores.sqlite.checkpoints.LONG_PAGES", 50)
    store = SqliteStore(tmp_path / "work.db", clock=SystemClock(), synchronous="OFF")
    await store.open()
    monkeypatch.setattr(checkpoints_of(store), "_conn", Broken())
    monkeypatch.setattr(checkpoints_of(store), "_long_at", 50)
    for _ in range(20):
        await store.turn("node", adds=[Add([a_large_record() for _ in range(10)])])
    assert sum((await store.count()).values()) == 200
    await store.close()


def checkpoints_of(store: SqliteStore) -> Checkpoints:
    assert store._writer is not None
    return store._writer._checkpoints


class Broken:
    """A connection that cannot copy."""

    def wal_checkpoint(self, **mode: int) -> None:
        raise apsw.IOError("the disk is on fire")


def a_large_record() -> TaskRecord:
    now = datetime.now(UTC)
    return TaskRecord(new_uuid(), "work", now, now, now, args='"' + "x" * 4000 + '"')


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
    assert LONG_PAGES <= longest <= LONG_PAGES + WORTH_PAGES


BUSY_WRITER = """
import asyncio, os, sys
from datetime import UTC, datetime
from pathlib import Path
from taskyard.model.task import TaskRecord, new_uuid
from taskyard.ports.store import Add
from taskyard.ports.clock import SystemClock
from taskyard.stores.sqlite import SqliteStore

async def main(path):
    store = SqliteStore(path, clock=SystemClock(), synchronous="OFF")
    await store.open()
    longest = 0
    for _ in range(300):
        now = datetime.now(UTC)
        records = [TaskRecord(new_uuid(), "work", now, now, now, args='"' + "x" * 4000 + '"') for _ in range(40)]
        await store.turn("node", adds=[Add(records)])
        longest = max(longest, path.with_name("work.db-wal").stat().st_size // 4096)
    path.with_name(f"longest-{os.getpid()}").write_text(str(longest))
    await store.close()

asyncio.run(main(Path(sys.argv[1])))
"""
