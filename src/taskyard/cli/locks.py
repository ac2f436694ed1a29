"""Who holds which lock on a file, off the kernel's own list. Where there is none (not Linux), nobody can be named."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path("/proc/locks")

SQLITE_WRITER = 120
"""The byte of the `-shm` file that SQLite's one writer in WAL mode has locked."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock. `state` is the kernel's letter for it: R runs, S sleeps, T is stopped."""

    pid: int
    command: str
    state: str

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


def turn_file(database: Path) -> Path:
    """The file whose lock is the turn to write."""
    return database.with_name(database.name + "-yard") / "turn"


def node_file(database: Path, incarnation: str) -> Path:
    """The file that a node holds for as long as it lives."""
    return database.with_name(database.name + "-yard") / f"n-{incarnation}"


def find_turn_holder(database: Path) -> Holder | None:
    """Who has the turn to write to this store now."""
    return _find(turn_file(database), "FLOCK", None)


def find_node_holder(database: Path, incarnation: str) -> Holder | None:
    """The process of a node that lives."""
    return _find(node_file(database, incarnation), "FLOCK", None)


def find_sqlite_writer(database: Path) -> Holder | None:
    """Who is inside of a write transaction of SQLite's own: one of us, or any other program."""
    return _find(database.with_name(database.name + "-shm"), "POSIX", SQLITE_WRITER)


def _find(path: Path, kind: str, byte: int | None) -> Holder | None:
    try:
        inode = os.stat(path).st_ino
        listed = LOCKS.read_text()
    except OSError:
        return None
    for line in listed.splitlines():
        pid = _holder_in(line, kind, inode, byte)
        if pid is not None and pid > 0:  # other namespaces' processes are listed as 0 or -1
            return _look_at(pid)
    return None


def _holder_in(line: str, kind: str, inode: int, byte: int | None) -> int | None:
    """The process of one line, as in `3: FLOCK  ADVISORY  WRITE 4242 fe:00:131 0 EOF`; waiting ones have an arrow.

    Only the inode is compared: on some file systems the device in this list is not the one that `stat` tells."""
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


def _look_at(pid: int) -> Holder | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None  # it ended while we looked
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    return Holder(pid, command or name, stat[stat.rindex(")") + 2])
