"""The machine: versions, the file system under a store, room on its disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import taskyard
from taskyard.cli.doctor.finding import Finding, problem, warning
from taskyard.cli.text import size
from taskyard.stores.sqlite.place import MOUNTS, NETWORK, filesystem_of

LOW_BYTES, VERY_LOW_BYTES = 1_000_000_000, 100_000_000
"""Room on the disk below which it is worth a warning, and below which the next checkpoint may fail."""

VOLATILE = {"tmpfs", "ramfs"}


def versions() -> Iterator[Finding]:
    import apsw

    uvloop = "yes"
    try:
        import uvloop as _  # noqa: F401
    except ImportError:
        uvloop = "no"
    yield Finding(
        "taskyard",
        f"{taskyard.__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"uvloop: {uvloop}",
        data={"version": taskyard.__version__, "python": platform.python_version()},
    )
    yield Finding(
        "sqlite",
        f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})",
        data={"sqlite": apsw.sqlite_lib_version(), "apsw": apsw.apsw_version()},
    )


def file_system(path: Path) -> Iterator[Finding]:
    """Where the store lies. On a network its locks would not protect it; in memory it is gone with the machine."""
    if not MOUNTS.exists():
        return
    kind = filesystem_of(path.resolve(), MOUNTS.read_text()) or "unknown"
    if kind in NETWORK:
        yield problem(
            "file system",
            f"{kind}, a network file system, where SQLite's locks do not protect the file",
            "move the store to a local disk while nothing uses it",
            file_system=kind,
        )
    elif kind in VOLATILE:
        yield warning(
            "file system",
            f"{kind}, which lives in memory: the store is gone when the machine restarts",
            "put the store on a disk, unless that is what you want",
            file_system=kind,
        )
    else:
        yield Finding("file system", kind, data={"file_system": kind})


def room(folder: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as exc:
        yield warning("disk", f"cannot tell how much room is left: {exc.strerror}", "check the folder's permissions")
        return
    text = f"{size(free)} free"
    if free < VERY_LOW_BYTES:
        yield problem("disk", text, "free some space: the store will soon refuse to take tasks", free_bytes=free)
    elif free < LOW_BYTES:
        yield warning("disk", text, "free some space before the store has none left", free_bytes=free)
    else:
        yield Finding("disk", text, data={"free_bytes": free})


def permissions(path: Path) -> Iterator[Finding]:
    """Whether this user can write to the store and beside it."""
    refused = [str(place) for place in (path.parent, path, *_beside(path)) if not os.access(place, os.W_OK)]
    if refused:
        yield problem(
            "permissions",
            f"this user (uid {os.geteuid()}) cannot write to {', '.join(refused)}",
            "give this user write permission there, or run as the user whose store it is",
            read_only=refused,
        )


def _beside(path: Path) -> list[Path]:
    names = (f"{path.name}-wal", f"{path.name}-shm", f"{path.name}-yard")
    return [place for name in names if (place := path.with_name(name)).exists()]
