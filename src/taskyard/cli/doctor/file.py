"""The file: opened for reading only, its schema, its integrity, its log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from taskyard.cli.doctor.finding import Finding, problem, warning
from taskyard.cli.doctor.schema import describe_refusal, describe_schema
from taskyard.cli.text import duration, size
from taskyard.errors import StoreMigrationChanged, StoreTooNew
from taskyard.stores.sqlite.place import APPLICATION_ID, find_schema_of

CHECK_S = 20.0
"""How long the check of the whole file may take; a very large one is then only partly checked."""

LARGE_WAL = 64_000_000
"""The log is folded back into the file at 16 MB; if it is much larger, something keeps that from happening."""


@contextmanager
def opened_read_only(path: Path) -> Iterator[apsw.Connection]:
    """A connection that writes nothing. Where even SQLite's shared memory cannot be made, the file is read as it lies,
    without its log."""
    try:
        conn = _connect(path, "mode=ro")
    except apsw.CantOpenError:
        conn = _connect(path, "immutable=1")
    try:
        yield conn
    finally:
        conn.close()


def _connect(path: Path, how: str) -> apsw.Connection:
    uri = path.absolute().as_uri() + "?" + how
    conn = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        conn.set_busy_timeout(2_000)
        conn.execute("PRAGMA query_only = ON; PRAGMA mmap_size = 0; SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        conn.close()
        raise
    return conn


def sizes(path: Path) -> Iterator[Finding]:
    wal = path.with_name(path.name + "-wal")
    file_bytes = path.stat().st_size
    wal_bytes = wal.stat().st_size if wal.exists() else 0
    text = f"{path}, {size(file_bytes)} and {size(wal_bytes)} of log"
    if wal_bytes > LARGE_WAL:
        yield warning(
            "file",
            text,
            "the log is not being folded back: a program that reads the store keeps a transaction open; end it",
            file_bytes=file_bytes,
            wal_bytes=wal_bytes,
        )
    else:
        yield Finding("file", text, data={"file_bytes": file_bytes, "wal_bytes": wal_bytes})


def schema(path: Path, conn: apsw.Connection) -> Iterator[Finding]:
    """Whose database it is, and of which version."""
    owner, found = _one(conn, "PRAGMA application_id"), int(_one(conn, "PRAGMA user_version"))
    if owner == 0 and found == 0 and _one(conn, "SELECT count(*) FROM sqlite_schema") == 0:
        yield Finding("schema", "none yet: the file is empty, and becomes a store when it is first opened")
    elif owner != APPLICATION_ID:
        yield problem(
            "schema",
            "this is not a Taskyard store, but another program's database",
            "name another file; nothing was changed in this one",
        )
    else:
        try:
            yield describe_schema(find_schema_of(conn, path))
        except (StoreTooNew, StoreMigrationChanged) as error:
            yield describe_refusal(error)


def integrity(path: Path, conn: apsw.Connection) -> Iterator[Finding]:
    """SQLite's own quick check of every page, within a bounded time."""
    began = time.monotonic()
    conn.set_progress_handler(lambda: time.monotonic() - began > CHECK_S, 100_000)
    try:
        said = [row[0] for row in conn.execute("PRAGMA quick_check(5)")]
    except apsw.InterruptError:
        yield warning(
            "integrity",
            f"the file is too large to be checked within {duration(CHECK_S)}; nothing wrong was found so far",
            "check a copy of it at leisure with PRAGMA integrity_check",
        )
        return
    finally:
        conn.set_progress_handler(None)
    if said == ["ok"]:
        yield Finding("integrity", f"quick check passed in {duration(time.monotonic() - began)}")
    else:
        lines = [line for one in said for line in str(one).splitlines() if not line.startswith("***")]
        yield damaged(path, "; ".join(lines))


def damaged(path: Path, why: str) -> Finding:
    return problem(
        "integrity",
        f"the file is damaged, or no database at all: {why}",
        f"stop everything that uses it, keep a copy of the file with its -wal, and restore a backup or try "
        f"`sqlite3 {path} .recover`",
    )


def _one(conn: apsw.Connection, sql: str) -> Any:
    return conn.execute(sql).get
