"""Power cuts for SQLite: every write and sync recorded, and the files as a cut at some moment may have left them.

`RecordingVFS` stands between SQLite and the real files. `crash_image` takes its log up to a cut and makes what a disk
may hold afterwards: everything that was synced, and of the rest any part, in any order, torn at sectors of 512 bytes.
A file that was never synced may be missing, a removed one may be back.

`FullVFS` is a disk that is full when told so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apsw

SECTOR = 512
"""What a disk writes as a whole. SQLite too relies on no more than that."""


class Write(NamedTuple):
    file: str
    offset: int
    data: bytes


class Truncate(NamedTuple):
    file: str
    size: int


class Delete(NamedTuple):
    file: str
    is_synced: bool


class Sync(NamedTuple):
    """Noted when it has returned."""

    file: str


class Mark(NamedTuple):
    """Something that happened outside: an acknowledgement, a result that was seen."""

    what: str
    value: Any


Op = Write | Truncate | Delete | Sync | Mark

KEPT = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL


class RecordingVFS(apsw.VFS):
    """Registered under `name` while it lives; call `unregister` at the end. Files are known by their last part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[Op] = []
        super().__init__(name, "")

    def mark(self, what: str, value: Any = None) -> None:
        self.log.append(Mark(what, value))

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _RecordedFile(self.log, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self.log.append(Delete(Path(filename).name, bool(syncdir)))


class _RecordedFile(apsw.VFSFile):
    def __init__(self, log: list[Op], name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._log: list[Op] | None = log if flags[0] & KEPT and name is not None else None
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "").name

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        if self._log is not None:
            self._log.append(Write(self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        if self._log is not None:
            self._log.append(Truncate(self._name, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        if self._log is not None:
            self._log.append(Sync(self._name))


# --- what a cut leaves ------------------------------------------------------------------------------------------------

Change = Write | Truncate | Delete


class _Disk:
    """What is on it for certain, and what may be."""

    def __init__(self) -> None:
        self.synced: dict[str, bytearray] = {}
        self.pending: dict[str, list[Change]] = {}
        self._new: set[str] = set()

    def follow(self, op: Change | Sync) -> None:
        match op:
            case Sync(file):
                _apply(self.synced, self.pending.pop(file, []))
                # SQLite syncs the folder together with a log or journal that it has just made.
                if file in self._new:
                    self._new.discard(file)
                    self._sync_folder()
            case Delete(file, is_synced):
                self._new.discard(file)
                self.pending.setdefault(file, []).append(op)
                if is_synced:
                    self._sync_folder()
            case _:
                if (
                    op.file not in self.synced
                    and op.file not in self.pending
                    and op.file.endswith(("-wal", "-journal"))
                ):
                    self._new.add(op.file)
                self.pending.setdefault(op.file, []).append(op)

    def _sync_folder(self) -> None:
        """From here on, what was removed stays removed."""
        for file, changes in self.pending.items():
            last = max((at for at, change in enumerate(changes, 1) if isinstance(change, Delete)), default=0)
            if last:
                self.synced.pop(file, None)
                self.pending[file] = changes[last:]


def crash_image(log: Sequence[Op], cut: int, rng: random.Random) -> dict[str, bytes]:
    """The files after a power cut that let the first `cut` entries of the log happen and none of the rest."""
    disk = _Disk()
    for op in log[:cut]:
        if not isinstance(op, Mark):
            disk.follow(op)
    for changes in disk.pending.values():
        _apply(disk.synced, _survivors(changes, rng))
    return {file: bytes(content) for file, content in disk.synced.items()}


def _survivors(unsynced: list[Change], rng: random.Random) -> list[Change]:
    """Those of the unsynced changes of one file that reached the disk, in the order in which they did."""
    match rng.choice(("none", "all", "prefix", "some", "shuffled")):
        case "none":
            return []
        case "all":
            return unsynced
        case "prefix":
            kept = unsynced[: rng.randint(0, len(unsynced))]
            return kept[:-1] + _torn(kept[-1:], rng)
        case "some":
            share = rng.random()
            return [op for op in unsynced if rng.random() < share]
        case _:
            share = rng.random()
            pieces = [piece for op in unsynced for piece in _sectors(op) if rng.random() < share]
            rng.shuffle(pieces)
            return pieces


def _torn(ops: Iterable[Change], rng: random.Random) -> list[Change]:
    """Of a write the first few sectors."""
    return [piece for op in ops for piece in _sectors(op)[: rng.randint(0, 8)]]


def _sectors(op: Change) -> list[Change]:
    if not isinstance(op, Write):
        return [op]
    pieces: list[Change] = []
    start = 0
    while start < len(op.data):
        end = start + SECTOR - (op.offset + start) % SECTOR
        pieces.append(Write(op.file, op.offset + start, op.data[start:end]))
        start = end
    return pieces


def _apply(files: dict[str, bytearray], ops: Iterable[Change]) -> None:
    for op in ops:
        if isinstance(op, Delete):
            files.pop(op.file, None)
            continue
        content = files.setdefault(op.file, bytearray())
        if isinstance(op, Truncate):
            del content[op.size :]
        else:
            content.extend(bytes(max(0, op.offset - len(content))))
            content[op.offset : op.offset + len(op.data)] = op.data


# --- a disk without room ----------------------------------------------------------------------------------------------


class FullVFS(apsw.VFS):
    """Registered under `name`; while `is_full`, no write that would make a file longer succeeds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_full = False
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _FullFile(self, name, flags)


class _FullFile(apsw.VFSFile):
    def __init__(self, disk: FullVFS, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        if self._disk.is_full and offset + len(data) > self.xFileSize():
            raise apsw.FullError("no room, as the test asked")
        super().xWrite(data, offset)
