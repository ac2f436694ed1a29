"""The folder of a store's large artifacts on this machine, and the sweep that removes what no task has any more.

Every store has a folder of its own, so that a sweep never finds the files of another store.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from taskyard.errors import ArtifactElsewhere, InvalidInput, quote
from taskyard.execution.artifacts import default_folder, safe_name
from taskyard.model.attempt import Artifact
from taskyard.ports.store import Store

BATCH = 500
"""Tasks that the store is asked for at once."""

UNFINISHED_S = 86_400.0
"""Age of a file that a run began and never finished, after which it is removed: no run writes one file for a day."""

_UNFINISHED = ".unfinished-"


class ArtifactFolder:
    """Where this process writes large artifacts. `path` is None until it is known; `is_temporary` says that the folder
    goes with the process."""

    def __init__(self, path: Path | None, *, is_temporary: bool = False) -> None:
        self.path, self.is_temporary = path, is_temporary

    def exists(self) -> bool:
        return self.path is not None and os.path.isdir(self.path)

    def remove(self) -> None:
        """Remove a temporary folder with all in it."""
        if self.is_temporary and self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


def choose_folder(given: str | os.PathLike[str] | None, store: Store, url: str | None) -> ArtifactFolder:
    """The folder for the artifacts of this store, and of no other: below the one given, else beside a SQLite file,
    among the data of this user for a database server, or a temporary one. A store without `path` and `url` is taken to
    live in this process, so its folder is temporary in any case."""
    name = _find_name(store, url)
    if given is not None:
        root = Path(given).expanduser().absolute()
        return _make_temporary(root) if name is None else ArtifactFolder(root / name)
    path = getattr(store, "path", None)
    if isinstance(path, Path):
        return ArtifactFolder(path.with_name(path.name + "-artifacts"))
    if name is None:
        return _make_temporary(Path(tempfile.gettempdir()))
    try:
        return ArtifactFolder(default_folder() / name)
    except OSError:
        return ArtifactFolder(None)  # told by the run that wants to write a large artifact


def _make_temporary(root: Path) -> ArtifactFolder:
    """The folder itself is made on first use: most yards in memory never have a large artifact."""
    return ArtifactFolder(root / f"taskyard-artifacts-{os.getpid()}-{os.urandom(8).hex()}", is_temporary=True)


def _find_name(store: Store, url: str | None) -> str | None:
    """The name of the folder of this store: a hash of its address. None if it has none, and lives in this process."""
    path = getattr(store, "path", None)
    if isinstance(path, Path):
        return _short_hash(f"sqlite://{os.path.realpath(path)}")
    address = url or getattr(store, "url", None)
    if isinstance(address, str) and address.startswith(("postgresql://", "postgres://")):
        return _short_hash(_without_account(address))
    return None


def _without_account(address: str) -> str:
    """The database by its address, without user and password: another account finds the same folder."""
    parts = urlsplit(address)
    query = urlencode([(name, value) for name, value in parse_qsl(parts.query) if name not in ("user", "password")])
    return urlunsplit(("postgresql", parts.netloc.rpartition("@")[2], parts.path, query, ""))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- sweeping ---------------------------------------------------------------------------------------------------------


async def sweep(store: Store, folder: Path, *, now_s: float | None = None) -> int:
    """Remove the folders of tasks that the store no longer has, and old unfinished files; how many folders it removed.

    Race: a task's folder is made while its run holds the task, so the store has the task for as long as the run may
    write. Only names that were seen before the store was asked are removed."""
    if not ArtifactFolder(folder).exists():  # as in most yards: that is no reason to start a thread
        return 0
    now_s = time.time() if now_s is None else now_s
    names = await asyncio.to_thread(_list_tasks, folder, now_s)
    removed = 0
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        known = await store.list_known(batch)
        gone = [name for name in batch if name not in known]
        await asyncio.to_thread(_remove, folder, gone)
        removed += len(gone)
    return removed


def _list_tasks(folder: Path, now_s: float) -> list[str]:
    """The ids of the tasks that have a folder here. Old unfinished files are removed on the way. A folder whose name is
    not the id itself, but stands for an unusual one, is left alone: the store cannot be asked for it."""
    names: list[str] = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and _is_uuid(entry.name):
            names.append(entry.name)
            _remove_unfinished(Path(entry.path), now_s)
    return names


def _is_uuid(name: str) -> bool:
    return len(name) == 36 and name.count("-") == 4 and safe_name(name) == name


def _remove_unfinished(folder: Path, now_s: float) -> None:
    for path in _files(folder, _UNFINISHED):
        try:
            if path.stat().st_mtime < now_s - UNFINISHED_S:
                path.unlink()
        except OSError:
            pass


def _files(folder: Path, prefix: str) -> Iterable[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.startswith(prefix)]
    except OSError:
        return []


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_file(artifact: Artifact) -> bytes:
    """The content of an artifact that is a file. The path is tried whatever the name of the host is: that changes when
    a container is created anew, and its volume stays. `ArtifactElsewhere` if the file is not there, or is on another
    machine; `InvalidInput` if this machine wrote it and it was changed."""
    host, path = artifact.host or "", Path(artifact.path or "")
    is_here = host == socket.gethostname()
    try:
        content = _read_if_sized(path, artifact.size)
    except OSError as exc:
        why = (exc.strerror or str(exc)) if is_here else ""
        raise ArtifactElsewhere(artifact.name, host, str(path), why=why) from exc
    if content is not None and hashlib.sha256(content).hexdigest() == artifact.sha256:
        return content
    if not is_here:
        raise ArtifactElsewhere(artifact.name, host, str(path))
    raise InvalidInput(f"the file {path} of artifact {quote(artifact.name)} was changed since it was written")


def _read_if_sized(path: Path, size: int) -> bytes | None:
    """None if it is no file of this size: what another machine has there may be a pipe, or far larger."""
    found = path.stat()
    return path.read_bytes() if stat.S_ISREG(found.st_mode) and found.st_size == size else None
