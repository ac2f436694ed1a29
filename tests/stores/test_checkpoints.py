"""The log is copied back beside the writer, and begins anew before it gets long."""

from __future__ import annotations

import threading
from pathlib import Path

import apsw
import pytest

from taskyard.stores.sqlite.checkpoints import EVERY_PAGES, WRITER_PAGES, Checkpoints
from taskyard.stores.sqlite.place import connect

PAGE = 4096
ROW = b"x" * (30 * PAGE)


class File:
    """A database with a writer whose log is looked after."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "work.db"
        self.conn = connect(self.path, synchronous="OFF", vfs=None, write=True)
        self.conn.execute("CREATE TABLE blob (body)")
        self.copier = connect(self.path, synchronous="OFF", vfs=None, write=False)
        self.checkpoints = Checkpoints(self.conn, self.copier)

    def write(self, pages: int, *, pausing: bool = False) -> None:
        """About as many pages, in commits of some thirty each; `pausing` lets every copy finish before the next one."""
        for _ in range(-(-pages // 33)):
            self.conn.execute("INSERT INTO blob VALUES (?)", (ROW,))
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
    monkeypatch.setattr(
        "taskyard.stores.sqlite.checkpoints._copy", lambda conn: copied_by.append(threading.current_thread().name)
    )
    file.write(EVERY_PAGES - 200, pausing=True)
    assert copied_by == []
    file.write(300, pausing=True)
    assert [name.rpartition("_")[0] for name in copied_by] == ["taskyard-checkpoint"]


def test_a_quiet_log_begins_anew(file):
    """A copy that nobody outruns reaches the end, and the next commit starts the log from its beginning."""
    file.write(10 * EVERY_PAGES, pausing=True)
    assert EVERY_PAGES <= file.log_pages() <= 1.1 * EVERY_PAGES


def test_the_writer_catches_up_when_copies_never_reach_the_end(file):
    """Under a load without a pause the log stays bounded all the same."""
    file.checkpoints._own = Never()
    for _ in range(100):
        file.write(200, pausing=True)
        file.checkpoints.catch_up()
    assert WRITER_PAGES <= file.log_pages() <= WRITER_PAGES + EVERY_PAGES
    file.copier.close()


class Never:
    """A copier that gets nowhere."""

    def wal_checkpoint(self, **mode: int) -> None:
        raise apsw.BusyError("somebody is copying")

    def close(self) -> None: ...


def test_a_reader_of_an_old_state_keeps_the_writer_from_trying_at_every_commit(file, monkeypatch):
    """The log cannot begin anew while somebody reads what it replaced; the next try comes when it has grown again."""
    reader = connect(file.path, synchronous="OFF", vfs=None, write=False)
    file.write(30)
    reader.execute("BEGIN; SELECT count(*) FROM blob").fetchall()
    file.write(WRITER_PAGES)
    tries: list[int] = []
    monkeypatch.setattr("taskyard.stores.sqlite.checkpoints._copy", lambda conn: tries.append(1))
    for _ in range(20):
        file.write(30, pausing=True)
        file.checkpoints.catch_up()
    assert 1 <= len(tries) <= 3
    reader.close()
