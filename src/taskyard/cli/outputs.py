"""`taskyard log` and `taskyard artifact`: what attempts leave behind."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from taskyard.cli.console import say, say_json
from taskyard.cli.documents import Revealed
from taskyard.cli.errors import UsageError
from taskyard.cli.target import Target, opened, resolve
from taskyard.cli.text import clean, clock_time, size
from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine
from taskyard.model.task import Attempt

SHOWN_LINES = 10
"""Log lines that `taskyard show` prints."""


async def show_log(
    target: Target, fragment: str, *, attempt: int | None, limit: int, reveal: bool, as_json: bool
) -> int:
    async with opened(target.bare()) as yard:
        record = await yard.handle(await resolve(yard, fragment)).record()
        attempts = await yard.attempts(record.uuid)
        lines = await yard.log_lines(record.uuid, attempt, limit=limit)
    shown = Revealed(record, reveal=reveal)
    if as_json:
        say_json({"task": record.uuid, "lines": line_documents(lines, attempts, shown)})
        return 0
    last: int | None = None
    for one in lines:
        if one.token != last and len({other.token for other in lines}) > 1:
            say(f"attempt {number_of(one.token, attempts)}")
        last = one.token
        say(line_text(one, shown))
    return 0


def line_text(one: AttemptLine, shown: Revealed) -> str:
    """One line of the log as people read it."""
    line = one.line
    if line.dropped:
        return f"{clock_time(line.at)}  … {line.dropped:,} lines dropped"
    level = "" if line.level == "info" else f"{line.level}: "
    return clean(f"{clock_time(line.at)}  {level}{shown.text(line.text)}")


def line_documents(lines: list[AttemptLine], attempts: list[Attempt], shown: Revealed) -> list[dict[str, Any]]:
    return [
        {
            "attempt": number_of(token, attempts),
            "at": line.at,
            "level": line.level,
            "origin": line.origin,
            "text": shown.text(line.text),
            "dropped": line.dropped,
        }
        for token, line in lines
    ]


def artifact_documents(artifacts: list[AttemptArtifact], attempts: list[Attempt]) -> list[dict[str, Any]]:
    return [
        {
            "attempt": number_of(token, attempts),
            "name": artifact.name,
            "size": artifact.size,
            "sha256": artifact.sha256,
            "media_type": artifact.media_type,
            "created_at": artifact.created_at,
            "host": artifact.host,
            "path": artifact.path,
        }
        for token, artifact in artifacts
    ]


def artifact_text(artifact: Artifact) -> str:
    where = "in the store" if artifact.path is None else f"{artifact.host}:{artifact.path}"
    return clean(f"{artifact.name}  {size(artifact.size)}  {where}")


def number_of(token: int, attempts: list[Attempt]) -> int | None:
    """The number of the attempt with this token, if the attempt is still kept."""
    return next((one.attempt for one in attempts if one.token == token), None)


async def write_artifact(target: Target, fragment: str, name: str, *, attempt: int | None, file: str | None) -> int:
    async with opened(target.bare()) as yard:
        content = await yard.read_artifact(await resolve(yard, fragment), name, attempt)
    if file is not None:
        await asyncio.to_thread(_write, Path(file), content)
    elif sys.stdout.isatty():
        say(_as_text(name, content))
    else:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    return 0


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as exc:
        raise UsageError(f"{path} cannot be written: {os.strerror(exc.errno or 0)}") from exc


def _as_text(name: str, content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{name} is binary: write it to a file with -o FILE, or into a pipe")
    return text.rstrip("\n")
