"""The folder beside the database (`work.db-yard/`): who is alive, whose turn it is to write, and waking each other.

Every process that has the store open holds a file here under an exclusive `flock`, which the kernel lets go of the
moment the process dies: no clock, no beats, no false verdicts. After a commit a process opens and closes its own file,
which inotify tells the others; the death of a process closes its file, and so tells them too.

Locks are `flock` because a POSIX lock vanishes when *any* descriptor of that file is closed in the process. What
`flock` gets wrong is fork: a child shares the lock and would keep a dead parent alive. So children close these files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import struct
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITE_LOCK = "turn"
"""The file whose lock a writer holds."""

NODE = "n-"
"""How the names of the files of nodes begin."""


def folder_of(database: Path) -> Path:
    """The folder beside this database."""
    return database.with_name(database.name + "-yard")


def node_file_name(incarnation: str) -> str:
    """The file that a node holds while it lives."""
    return NODE + incarnation


_open_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


class LockFile:
    """A file that this process holds, or tries to hold, under `flock`."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        # Another's file may belong to another user; looking at its lock needs no more than reading.
        self._fd = os.open(path, os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY), 0o666)
        _open_files.add(self)

    def lock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def is_held_elsewhere(self) -> bool:
        """Whether another open file holds the lock. Asked with a shared lock, so that two who ask do not collide."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            raise
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def remove_if_dead(self) -> bool:
        """Remove the file if nobody holds it; whether it was so. The shared lock is kept until the file is gone, so
        that whoever makes it anew at the same moment finds it unlinked, and tries again."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        if self.is_linked():
            self.path.unlink(missing_ok=True)
        self.close()
        return True

    def is_linked(self) -> bool:
        """Whether the path still names this very file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        _open_files.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


class WriteTurn:
    """Writers of all processes (and of all stores in one process) take turns, in the order they asked.

    SQLite's own way is to try again after a sleep, under which one writer can wait for seconds while another has it."""

    def __init__(self, folder: Path) -> None:
        self._file = LockFile(folder / WRITE_LOCK)

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._file.lock()
        try:
            yield
        finally:
            self._file.unlock()

    def close(self) -> None:
        self._file.close()


class Sidecar:
    """This store's own presence, and its view of the others. Methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._mine: dict[str, LockFile] = {}
        self._peers: dict[str, LockFile] = {}
        self._me = self.appear(f"p-{secrets.token_hex(8)}")
        self.look_around()

    def appear(self, name: str) -> LockFile:
        """Hold the file `name`, from now until `vanish` or the end of the process."""
        if name in self._mine:
            return self._mine[name]
        while True:
            file = LockFile(self._folder / name)
            file.lock()
            # Race: someone may have taken the file for a dead one and removed it before we locked it.
            if file.is_linked():
                with self._lock:
                    self._mine[name] = file
                return file
            file.close()

    def vanish(self, name: str) -> None:
        with self._lock:
            file = self._mine.pop(name, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
            file.close()

    def look_around(self) -> None:
        """See who else is here, and remove what dead processes other than nodes have left."""
        names = {name for name in os.listdir(self._folder) if name[:2] in ("p-", NODE)}
        with self._lock:
            for gone in self._peers.keys() - names:
                self._peers.pop(gone).close()
            for name in names - self._peers.keys() - self._mine.keys():
                with suppress(FileNotFoundError):
                    self._peers[name] = LockFile(self._folder / name, create=False)
            for name in [name for name, peer in self._peers.items() if name[0] == "p" and peer.remove_if_dead()]:
                del self._peers[name]

    def is_alone(self) -> bool:
        return not self._peers

    def is_mine(self, name: str) -> bool:
        return name in self._mine

    def is_dead(self, name: str) -> bool | None:
        """Whether the holder of `name` is gone; None if its file is missing, so that this cannot be told."""
        with self._lock:
            if name in self._mine:
                return False
            peer = self._peers.get(name)
            if peer is None or not peer.is_linked():
                return None
            return not peer.is_held_elsewhere()

    def bury(self, name: str) -> None:
        """Remove what a dead node has left."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is not None and peer.remove_if_dead():
                del self._peers[name]

    def bury_strangers(self, known: set[str]) -> None:
        """Remove what nodes have left that died before they had joined, or after they had left."""
        for name in [name for name in list(self._peers) if name.startswith(NODE) and name not in known]:
            self.bury(name)

    def release(self, name: str) -> None:
        """Let go of the file without removing it: the others will find its holder dead, and rescue what it held."""
        with self._lock:
            file = self._mine.pop(name, None)
        if file is not None:
            file.close()

    def touch(self) -> None:
        """Tell the others that something was committed."""
        with suppress(OSError):
            os.close(os.open(self._me.path, os.O_WRONLY | os.O_CLOEXEC))

    def close(self, *, keep: set[str]) -> None:
        """Let go of everything but the files in `keep`, which stay held until the process ends."""
        for name in list(self._mine):
            if name in keep:
                _held_for_good.append(self._mine.pop(name))
            else:
                self.vanish(name)
        with self._lock:
            while self._peers:
                self._peers.popitem()[1].close()


_held_for_good: list[LockFile] = []
"""Nodes that were closed while a thread of theirs, which nobody can stop, was still running a task."""


class Watch:
    """inotify on the folder; elsewhere than on Linux there is none, and the store's poll once a second remains."""

    CLOSE_WRITE, CREATE, DELETE = 0x8, 0x100, 0x200

    def __init__(self, folder: Path) -> None:
        self.fd = -1
        if not sys.platform.startswith("linux"):
            return
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return  # out of inotify instances: the poll remains
        # Not what was only read: listing the folder, which every hint leads to, would be a hint again, and so for ever.
        mask = self.CLOSE_WRITE | self.CREATE | self.DELETE
        if libc.inotify_add_watch(fd, os.fsencode(folder), mask) < 0:
            os.close(fd)
            return
        self.fd = fd

    def read(self) -> set[str]:
        """The names of the files something happened to since the last call."""
        names: set[str] = set()
        with suppress(BlockingIOError):
            while data := os.read(self.fd, 65536):
                offset = 0
                while offset < len(data):
                    _, _, _, length = struct.unpack_from("iIII", data, offset)
                    names.add(data[offset + 16 : offset + 16 + length].rstrip(b"\0").decode(errors="replace"))
                    offset += 16 + length
        return names

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
