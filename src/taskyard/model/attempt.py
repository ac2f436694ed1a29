"""What an attempt leaves behind: its log lines and its artifacts, and the bounds that keep both small."""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec

from taskyard.errors import InvalidInput, quote

LINES_KEPT = 1_000
"""Lines kept of one attempt: the latest ones."""

LINE_CHARS = 4_000
"""Characters kept of one line."""

LINES_CHARS = 256 * 1024
"""Characters of all lines that wait together to be stored."""

ARTIFACTS_KEPT = 50
"""Artifacts of one attempt. Each name counts once."""

ARTIFACT_NAME_CHARS = 200
"""Characters in the name of an artifact."""

ARTIFACT_DATA_BYTES = 256 * 1024
"""Bytes up to which an artifact is kept in the store. A larger one is a file."""

LogLevel = Literal["debug", "info", "warning", "error", "critical"]

LineOrigin = Literal["run", "logging", "stdout", "stderr"]
"""How a line was written: by `current_run().log`, through `logging`, or to a standard stream."""


class LogLine(msgspec.Struct, frozen=True, gc=False):
    """One line that an attempt wrote. `at` is in UTC; no two lines of one attempt have the same. A line with `dropped`
    has no text: it stands for so many lines that were dropped."""

    at: datetime
    level: LogLevel
    text: str
    origin: LineOrigin
    dropped: int = 0


class Artifact(msgspec.Struct, frozen=True, gc=False):
    """A named result of an attempt beside its return value. A small one is in `data`; a large one is the file `path` on
    the machine `host`. `sha256` is the digest of the content in hexadecimal."""

    name: str
    size: int
    sha256: str
    media_type: str
    created_at: datetime
    data: bytes | None = None
    host: str | None = None
    path: str | None = None


class AttemptLine(NamedTuple):
    """A line, and the token of the attempt that wrote it."""

    token: int
    line: LogLine


class AttemptArtifact(NamedTuple):
    """An artifact, and the token of the attempt that made it."""

    token: int
    artifact: Artifact


def cut_line(text: str) -> str:
    """`text` as a line may have it: not too long, and without what a database refuses (NUL, lone surrogates). A long
    text loses its middle: the end of a traceback names the error."""
    if len(text) > LINE_CHARS:
        head = LINE_CHARS // 2
        text = f"{text[:head]}…{text[head + 1 - LINE_CHARS :]}"
    if "\0" in text:
        text = text.replace("\0", "\\0")
    return text.encode("utf-8", "backslashreplace").decode() if not text.isascii() else text


def dropped_line(count: int, at: datetime) -> LogLine:
    """The line that stands for `count` lines that were dropped, the last of them written at `at`."""
    return LogLine(at, "warning", "", "run", count)


class LineBuffer:
    """The latest lines, at most `LINES_KEPT` with `LINES_CHARS` characters. Counts what it drops."""

    __slots__ = ("_chars", "_dropped", "_dropped_at", "_lines")

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque()
        self._chars = self._dropped = 0
        self._dropped_at: datetime | None = None

    def append(self, line: LogLine) -> None:
        self._lines.append(line)
        self._chars += len(line.text)
        while len(self._lines) >= LINES_KEPT or self._chars > LINES_CHARS:  # one place is for the line that says so
            self._drop_oldest()

    def drop(self, count: int, at: datetime) -> None:
        """Drop all lines, and count more that came after them, the last of them at `at`."""
        while self._lines:
            self._drop_oldest()
        self._dropped += count
        self._dropped_at = at

    def _drop_oldest(self) -> None:
        oldest = self._lines.popleft()
        self._chars -= len(oldest.text)
        self._dropped += oldest.dropped or 1
        self._dropped_at = oldest.at

    def take(self) -> tuple[LogLine, ...]:
        """All lines, oldest first. If some were dropped, the first line says how many."""
        lines, self._lines = tuple(self._lines), deque()
        dropped, at = self._dropped, self._dropped_at
        self._chars, self._dropped, self._dropped_at = 0, 0, None
        return lines if at is None else (dropped_line(dropped, at), *lines)


def join_lines(earlier: Iterable[LogLine], later: Iterable[LogLine]) -> tuple[LogLine, ...]:
    """Both within the bounds of a `LineBuffer`."""
    buffer = LineBuffer()
    for lines in (earlier, later):
        for line in lines:
            buffer.append(line)
    return buffer.take()


def join_artifacts(earlier: Iterable[Artifact], later: Iterable[Artifact]) -> tuple[Artifact, ...]:
    """Both; a later artifact replaces an earlier one of the same name."""
    return tuple({artifact.name: artifact for artifact in (*earlier, *later)}.values())


def check_artifact_name(name: object) -> str:
    """`name` if it can name an artifact; raises `InvalidInput` otherwise."""
    if not isinstance(name, str) or not 0 < len(name) <= ARTIFACT_NAME_CHARS:
        raise InvalidInput(f"the name of an artifact must be 1 to {ARTIFACT_NAME_CHARS} characters, not {quote(name)}")
    if name in {".", ".."} or any(letter in "/\\" or unicodedata.category(letter) in {"Cc", "Cs"} for letter in name):
        raise InvalidInput(
            f"the name of an artifact must not have path separators or control characters in it, as {quote(name)} has"
        )
    return name
