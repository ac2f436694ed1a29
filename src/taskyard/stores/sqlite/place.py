"""Where the file is: checks before it is opened, and opening it. What is wrong gets an error that says what to do."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec

from taskyard.errors import (
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFolderMissing,
    StoreForeign,
    StoreFull,
    StoreOnNetwork,
    StoreReadOnly,
    StoreTooNew,
    StoreUnavailable,
)
from taskyard.model.state import TaskState, sql_guard
from taskyard.ports.store import Schema
from taskyard.stores.migrations import (
    Applied,
    Bundle,
    Installed,
    check_applied,
    check_installed,
    is_outdated,
    list_migrations,
    load_bundle,
    pending,
    schema_at,
)
from taskyard.stores.records import to_document
from taskyard.stores.sqlite.sidecar import folder_of

APPLICATION_ID = 0x7A5C_A12D
"""Written into the file's header, so that somebody else's database is never taken for ours."""

BUSY_MS = 10_000
"""How long to wait for a lock that another program holds."""

WAL_KEPT_BYTES = 16 << 20
"""What a log may keep of the disk once it is copied back: one large batch would otherwise keep its size for good."""

NETWORK = {
    "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "ceph", "lustre", "gfs2", "ocfs2",
    "glusterfs", "beegfs", "gpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.ceph", "davfs",
    "fuse.davfs2", "fuse.gcsfuse",
}  # fmt: skip

MOUNTS = Path("/proc/self/mountinfo")


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the file system `path` is on, off the kernel's list of mounts; the longest, latest match wins."""
    best, fstype = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if (path == mount or mount in path.parents) and len(mount.parts) >= best:
            best, fstype = len(mount.parts), right.split()[0]
    return fstype


def refuse_network(path: Path, mounts: Path = MOUNTS) -> None:
    if not mounts.exists():
        return  # not Linux: SQLite's own checks remain
    fstype = filesystem_of(path.resolve(), mounts.read_text())
    if fstype in NETWORK:
        raise StoreOnNetwork(str(path), fstype)


def prepare_folder(path: Path) -> Path:
    """Check that the database can be made and written at `path`; the folder beside it, made if need be."""
    check_place(path)
    refuse_network(path)
    if path.exists() and not os.access(path, os.W_OK | os.R_OK):
        raise StoreReadOnly(str(path))
    folder = folder_of(path)
    if path.exists() and not folder.exists():
        with typed_errors(path):
            refuse_stranger(path)
    _make_folder(path, folder)
    if not os.access(folder, os.W_OK):
        raise StoreReadOnly(str(path), f"no permission on {folder}")
    return folder


def check_place(path: Path) -> None:
    """Refuse a path at which no store can be, whatever else is done: a folder, a pipe, below a file."""
    with typed_errors(path):
        kind, above = _kind(path), next(folder for folder in path.parents if _kind(folder) is not None)
        if kind == stat.S_IFDIR:
            raise StoreForeign(str(path), "a folder", f"name a file in it, such as {path / 'work.db'}")
        if kind not in (None, stat.S_IFREG):
            raise StoreForeign(str(path), "not a regular file")
        if _kind(above) != stat.S_IFDIR:
            raise StoreForeign(str(above), "a file and no folder")
        if above != path.parent:
            raise StoreFolderMissing(str(path), str(path.parent))


def _kind(path: Path) -> int | None:
    """What is there, as `stat` tells it; None if nothing is."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _make_folder(path: Path, folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        hint = "move it away, or choose another path for the store"
        raise StoreForeign(str(folder), "a file where the store keeps a folder", hint) from None
    except FileNotFoundError:
        raise StoreReadOnly(str(path), f"{path.parent} takes no new files") from None
    except OSError as exc:
        raise from_os_error(path, exc) from None


def from_os_error(path: Path, exc: OSError) -> StoreError:
    """The typed error for what became of a file or folder beside the database."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(str(path))
    if exc.errno == errno.ENOENT:
        return StoreUnavailable(
            f"{exc.filename} was removed while the store {path} is in use, and processes find each other through it; "
            f"stop all that use the store and start them again, which makes it anew. No task is lost"
        )
    return StoreReadOnly(str(path), f"{exc.strerror}: {exc.filename}")


def to_store_error(path: Path, exc: apsw.Error) -> StoreError:
    """The typed error for what SQLite said."""
    match exc:
        case apsw.FullError():
            return StoreFull(str(path))
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.CantOpenError() | apsw.AuthError():
            return StoreReadOnly(str(path), str(exc))
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError():
            return StoreCorrupt(str(path), str(exc))
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            return StoreBusy(str(path))
        case apsw.IOError():
            return StoreUnavailable(
                f"the store {path} failed: {exc}; nothing of the call was written. If {path} or {path}-wal was removed "
                f"or replaced while it was in use, restart everything that uses the store; if not, look after the disk"
            )
        case _:
            return StoreUnavailable(
                f"the store {path} failed: {type(exc).__name__}: {exc}; nothing of the call was written"
            )


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except apsw.Error as exc:
        raise to_store_error(path, exc) from exc
    except OSError as exc:
        raise from_os_error(path, exc) from exc


def connect(path: Path, *, synchronous: str, vfs: str | None, write: bool) -> apsw.Connection:
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if write else 0)
    conn = apsw.Connection(str(path), flags=flags, vfs=vfs, statementcachesize=256)
    try:
        _set_up(conn, path, synchronous=synchronous, write=write)
    except BaseException:
        conn.close()
        raise
    return conn


def _set_up(conn: apsw.Connection, path: Path, *, synchronous: str, write: bool) -> None:
    conn.set_busy_timeout(BUSY_MS)
    # Plans must not depend on bound values: next to partial indexes SQLite would otherwise prepare a statement anew for
    # every new value (23 µs against 2).
    conn.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    # No copy of the log inside a commit (see `Checkpoints`), no mmap (a full disk would be a SIGBUS), and temporary
    # tables never on disk.
    _run(
        conn,
        "PRAGMA wal_autocheckpoint = 0; PRAGMA mmap_size = 0; PRAGMA temp_store = MEMORY; "
        f"PRAGMA trusted_schema = OFF; PRAGMA synchronous = {synchronous}; PRAGMA fullfsync = ON",
    )
    if not write:
        _run(conn, "PRAGMA query_only = ON; PRAGMA cache_size = -4000")
        return
    # What is not ours stays as it is: its log is not copied back into it when we close it again.
    conn.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    refuse_foreign(conn, path)
    conn.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    mode = conn.execute("PRAGMA journal_mode = WAL").get
    if mode != "wal":
        raise StoreReadOnly(str(path), f"its file system cannot do write-ahead logging (journal_mode is {mode})")
    _run(conn, f"PRAGMA cache_size = -16000; PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")


def _run(conn: apsw.Connection, statements: str) -> None:
    """All of them: `execute` alone stops at the first that answers with a row, as some settings do."""
    conn.execute(statements).fetchall()


def refuse_stranger(path: Path) -> None:
    """Refuse what is not ours before anything is made beside it."""
    find_version(path)


def find_version(path: Path) -> int:
    """The version of the schema, 0 if the file is empty; `StoreForeign` if it is not ours."""
    with _looking_at(path) as conn:
        return _user_version(conn)


def find_schema(path: Path) -> Schema:
    """What is to be applied. `StoreTooNew` or `StoreMigrationChanged` if this program does not fit the file."""
    with _looking_at(path) as conn:
        return find_schema_of(conn, path)


@contextmanager
def _looking_at(path: Path) -> Iterator[apsw.Connection]:
    """A connection that changes nothing. Without a log or a journal the file is opened as immutable, which leaves no
    trace. With one the file alone does not tell its state, so it is opened as a reader does."""
    is_in_use = any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal"))
    uri = f"{path.as_uri()}?{'mode=ro' if is_in_use else 'immutable=1'}"
    conn = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        conn.set_busy_timeout(BUSY_MS)
        refuse_foreign(conn, path)
        yield conn
    finally:
        conn.close()


def refuse_foreign(conn: apsw.Connection, path: Path) -> None:
    """Only an empty file, or one that has been ours before, may be written."""
    if conn.execute("PRAGMA application_id").get == APPLICATION_ID:
        return
    if conn.execute("PRAGMA user_version").get or conn.execute("SELECT count(*) FROM sqlite_schema").get:
        raise StoreForeign(str(path), "a SQLite database of another program")


def bundle() -> Bundle:
    """The triggers of this program."""
    illegal_start = sql_guard(f"'{TaskState.CREATED}'", "NEW.state")
    return load_bundle("sqlite", {"illegal_start": illegal_start, "illegal_move": sql_guard("OLD.state", "NEW.state")})


def _user_version(conn: apsw.Connection) -> int:
    version: Any = conn.execute("PRAGMA user_version").get
    return int(version)


def _find_installed(conn: apsw.Connection) -> Installed | None:
    row: Any = conn.execute("SELECT version, needs_program, checksum, objects FROM bundle").fetchone()
    if row is None:
        return None
    version, needs, checksum, objects = row
    return Installed(version, needs, checksum, msgspec.json.decode(objects, type=list[str]))


def _list_triggers(conn: apsw.Connection) -> set[str]:
    rows: Any = conn.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'")
    return {name for (name,) in rows}


def find_schema_of(conn: apsw.Connection, path: Path) -> Schema:
    known, ours, version = list_migrations("sqlite"), bundle(), _user_version(conn)
    if version > known[-1].number:
        raise StoreTooNew(str(path), version, known[-1].number)
    if version == 0:
        return schema_at(0, known, bundle=ours)
    rows: Any = conn.execute("SELECT number, name, checksum FROM migration ORDER BY number")
    check_applied(str(path), [Applied(*row) for row in rows], known)
    installed = _find_installed(conn)
    check_installed(str(path), installed, ours)
    return schema_at(version, known, installed=installed, bundle=ours)


def migrate(conn: apsw.Connection, path: Path) -> Schema:
    """Bring the schema to the newest version we know, in one transaction; the answer says what was found before. Refuse
    a file that is not ours, too new, or made with other SQL."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        refuse_foreign(conn, path)
        found = find_schema_of(conn, path)
        if found.pending:
            _apply(conn, found.version)
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise
    return found


def _apply(conn: apsw.Connection, version: int) -> None:
    at, ours = time.time_ns() // 1000, bundle()
    for migration in pending(list_migrations("sqlite"), version):
        _run(conn, migration.sql)
        row = migration.number, migration.name, migration.checksum, at
        conn.execute("INSERT INTO migration VALUES (?, ?, ?, ?)", row)
        conn.execute(f"PRAGMA user_version = {migration.number}")
    if version == 0:
        conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    installed = _find_installed(conn)
    if is_outdated(installed, ours):
        _install(conn, [] if installed is None else installed.objects, ours, at)


def _install(conn: apsw.Connection, recorded: Sequence[str], ours: Bundle, at: int) -> None:
    """Replace our triggers as a whole. Triggers that somebody else made stay."""
    for name in recorded:
        conn.execute(f"DROP TRIGGER IF EXISTS {name}")
    theirs = _list_triggers(conn)
    _run(conn, ours.sql)
    objects = to_document(sorted(_list_triggers(conn) - theirs))
    _run(conn, "DELETE FROM bundle")
    row = ours.version, ours.needs_program, ours.checksum, objects, at
    conn.execute("INSERT INTO bundle VALUES (?, ?, ?, ?, ?)", row)


class OpenFiles:
    """The database and its log as they were opened, known by device and inode. Once another file, or none, has the name
    of one of them, we write what nobody else will read. Asked by `stat` alone: closing a descriptor of the database
    would drop SQLite's locks on it."""

    def __init__(self, path: Path) -> None:
        self._known = {}
        for name in (str(path), f"{path}-wal"):
            with suppress(FileNotFoundError):
                self._known[name] = os.stat(name)

    def find_lost(self) -> str | None:
        """The name that no longer stands for the file that is open."""
        return next((name for name, opened in self._known.items() if not _is_at(name, opened)), None)


def _is_at(name: str, opened: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(name), opened)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # cannot be told; if it matters, the next read or write fails


# --- the standard library's sqlite3 -----------------------------------------------------------------------------------

_guarded: weakref.WeakValueDictionary[str, Guarded] = weakref.WeakValueDictionary()


class Guarded:
    """While this lives, opening the file with the standard library's sqlite3 in this process warns.

    Two copies of SQLite in one process do not know of each other's POSIX locks: when one closes the file, the kernel
    drops the locks of the other, and commits that were acknowledged can vanish."""

    _installed = False

    def __init__(self, path: Path) -> None:
        self.path = os.path.realpath(path)
        _guarded[self.path] = self
        if not Guarded._installed:
            Guarded._installed = True
            sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "sqlite3.connect" and _guarded and isinstance(args[0], str | bytes | os.PathLike):
        name = os.fsdecode(args[0]).removeprefix("file:").partition("?")[0]
        if os.path.realpath(name) in _guarded:
            warnings.warn(
                f"{name} is open as a Taskyard store in this process; opening it with sqlite3 as well can lose "
                "acknowledged commits. Use another process, or apsw",
                RuntimeWarning,
                stacklevel=3,
            )
