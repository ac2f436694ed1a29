"""Which process holds which lock of a store, from the kernel's list of locks. Only Linux has one: elsewhere every
answer is None."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from taskyard.stores.sqlite.sidecar import WRITE_LOCK, folder_of, node_file_name

LOCKS = Path("/proc/locks")

WAL_WRITER_BYTE = 120
"""The byte of the `-shm` file that SQLite's writer in WAL mode has locked."""


@dataclass(frozen=True, slots=True)
class LockOwner:
    """A process that holds a lock. `state` is the kernel's letter for it: R runs, S sleeps, T is stopped."""

    pid: int
    command: str
    state: str

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


def find_write_lock_owner(database: Path) -> LockOwner | None:
    """The process that has the write lock of this store."""
    return _find(folder_of(database) / WRITE_LOCK, "FLOCK", None)


def find_node_process(database: Path, incarnation: str) -> LockOwner | None:
    """The process of a node that is alive."""
    return _find(folder_of(database) / node_file_name(incarnation), "FLOCK", None)


def find_sqlite_writer(database: Path) -> LockOwner | None:
    """The process that is inside a write transaction of SQLite: one of ours, or any other program."""
    return _find(database.with_name(database.name + "-shm"), "POSIX", WAL_WRITER_BYTE)


def _find(path: Path, kind: str, byte: int | None) -> LockOwner | None:
    try:
        inode = os.stat(path).st_ino
        listed = LOCKS.read_text()
    except OSError:
        return None
    for line in listed.splitlines():
        pid = _owner_in(line, kind, inode, byte)
        if pid is not None and pid > 0:  # processes of other namespaces are listed as 0 or -1
            return _read_process(pid)
    return None


def _owner_in(line: str, kind: str, inode: int, byte: int | None) -> int | None:
    """The process of one line, as in `3: FLOCK  ADVISORY  WRITE 4242 fe:00:131 0 EOF`; waiting ones have an arrow.

    Only the inode is compared: on some file systems the device in this list differs from that of `stat`."""
    fields = line.split()
    if len(fields) != 8 or fields[1] != kind or fields[3] != "WRITE":
        return None
    if int(fields[5].rpartition(":")[2]) != inode:
        return None
    if byte is not None and not (fields[6] != "EOF" and int(fields[6]) <= byte and _reaches(fields[7], byte)):
        return None
    return int(fields[4])


def _reaches(end: str, byte: int) -> bool:
    return end == "EOF" or int(end) >= byte


def _read_process(pid: int) -> LockOwner | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None  # the process has just ended
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    return LockOwner(pid, command or name, stat[stat.rindex(")") + 2])
