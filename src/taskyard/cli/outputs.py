"""`taskyard log` and `taskyard artifact`: what attempts leave behind."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from taskyard.application.task_documents import ArtifactDocument, LineDocument
from taskyard.cli.console import say, say_json
from taskyard.cli.errors import UsageError
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, clock_time, size


async def show_log(target: Target, ref: str, *, attempt: int | None, limit: int, reveal: bool, as_json: bool) -> int:
    async with opened_application(target) as application:
        log = await application.tasks.get_log(ref, attempt=attempt, limit=limit, reveal=reveal)
    if as_json:
        say_json(log)
        return 0
    has_several = len({line.attempt for line in log.lines}) > 1
    last: int | None = 0
    for line in log.lines:
        if has_several and line.attempt != last:
            say(f"attempt {line.attempt}")
        last = line.attempt
        say(line_text(line))
    return 0


def line_text(line: LineDocument) -> str:
    """One line of the log as people read it."""
    if line.dropped:
        return f"{clock_time(line.at)}  … {line.dropped:,} lines dropped"
    level = "" if line.level == "info" else f"{line.level}: "
    return clean(f"{clock_time(line.at)}  {level}{line.text}")


def artifact_text(artifact: ArtifactDocument) -> str:
    where = "in the store" if artifact.path is None else f"{artifact.host}:{artifact.path}"
    return clean(f"{artifact.name}  {size(artifact.size)}  {where}")


async def write_artifact(target: Target, ref: str, name: str, *, attempt: int | None, file: str | None) -> int:
    async with opened_application(target) as application:
        content = (await application.tasks.read_artifact(ref, name, attempt=attempt)).data
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
