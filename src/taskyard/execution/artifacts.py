"""Makes artifacts: small ones as bytes, large ones as files in a folder of the node.

A file has the name `<folder>/<task>/<token>-<name>`, with unsafe characters replaced. It is written under another name
first, so that whoever reads the folder never finds half of one. Nothing here deletes files of ended attempts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mimetypes
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from taskyard.errors import InvalidInput, quote
from taskyard.model.attempt import ARTIFACT_DATA_BYTES, Artifact, check_artifact_name
from taskyard.model.task import to_json

CHUNK_BYTES = 1 << 20
"""Bytes read at once."""

BINARY, TEXT, JSON = "application/octet-stream", "text/plain; charset=utf-8", "application/json"

MEDIA_TYPE_CHARS = 100

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")

_SAFE_CHARS = 120
"""Characters kept of a name that is not safe as it is. With the token and a suffix it fits into any file system."""


def make_artifact(
    name: str,
    data: Any,
    path: str | os.PathLike[str] | None,
    media_type: str | None,
    *,
    target: ArtifactTarget,
    now: datetime,
) -> Artifact:
    """The artifact, written if it is large. Raises `InvalidInput` if it cannot be one, `OSError` if the disk fails."""
    check_artifact_name(name)
    if (data is None) == (path is None):
        raise InvalidInput(f"artifact {quote(name)} needs either data or path")
    if path is not None:
        source, kind = _open(name, path), BINARY
    else:
        content, kind = _to_bytes(name, data)
        source = io.BytesIO(content)
    kind = _check_media_type(media_type) or mimetypes.guess_type(name)[0] or kind
    with source:
        head = source.read(ARTIFACT_DATA_BYTES + 1)
        if len(head) <= ARTIFACT_DATA_BYTES:
            return Artifact(name, len(head), hashlib.sha256(head).hexdigest(), kind, now, data=head)
        size, digest, written = target.write(name, head, source)
    return Artifact(name, size, digest, kind, now, host=socket.gethostname(), path=str(written))


def _open(name: str, path: str | os.PathLike[str]) -> BinaryIO:
    try:
        # Without waiting: a named pipe would hold up the run until something writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError, TypeError) as exc:
        raise InvalidInput(f"artifact {quote(name)}: {quote(str(path))} cannot be read: {exc}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidInput(f"artifact {quote(name)}: {quote(str(path))} is no file")
    return open(fd, "rb")


def _to_bytes(name: str, data: Any) -> tuple[bytes, str]:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data), BINARY
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace"), TEXT
    return to_json(f"artifact {quote(name)}", data).encode(), JSON


def _check_media_type(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= MEDIA_TYPE_CHARS or not given.isprintable():
        raise InvalidInput(f"media_type must be a text such as 'image/png', not {quote(given)}")
    return given


class ArtifactTarget:
    """Where the files of one attempt go. `folder`: None means the default folder of this user."""

    def __init__(self, folder: str | None, uuid: str, token: int) -> None:
        self._folder, self._uuid, self._token = folder, uuid, token

    def write(self, name: str, head: bytes, rest: BinaryIO) -> tuple[int, str, Path]:
        """Write `head` and `rest` to the file of this name; its size, its digest and its path."""
        folder = self._make_folder()
        digest, size = hashlib.sha256(), 0
        fd, unfinished = tempfile.mkstemp(prefix=".unfinished-", dir=folder)
        try:
            with open(fd, "wb") as file:
                for chunk in _chunks(head, rest):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
            path = folder / f"{self._token}-{safe_name(name)}"
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        return size, digest.hexdigest(), path

    def _make_folder(self) -> Path:
        root = default_folder() if self._folder is None else Path(self._folder).absolute()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = root / safe_name(self._uuid)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def _chunks(head: bytes, rest: BinaryIO) -> Iterator[bytes]:
    yield head
    while chunk := rest.read(CHUNK_BYTES):
        yield chunk


def safe_name(name: str) -> str:
    """`name` as the name of a file. One that has to be changed ends in a digest, so that no two become the same."""
    safe = _UNSAFE.sub("_", name)[:_SAFE_CHARS].lstrip(".")
    if safe == name:
        return safe
    return f"{safe or '_'}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def default_folder() -> Path:
    """A folder of this user's own: among the user's data, or else among the temporary files."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    folder = Path(data) / "taskyard" / "artifacts"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary_folder()


def _temporary_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"taskyard-artifacts-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    # Everybody may write among the temporary files: the folder must not be one that somebody else has put there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user; remove it, or set another folder")
    return folder
