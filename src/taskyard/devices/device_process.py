"""Commands on this machine, each in a process group of its own that is killed as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from taskyard.errors import DeviceLost

CHUNK = 256 << 10
"""Bytes: what is written or read at once."""

KILL_WAIT_S = 5.0
"""Seconds: how long a killed process may take to end; one that the kernel blocks ends later."""


async def run_process(
    device: str, words: Sequence[str], content: bytes = b"", *, idle_s: float | None = None
) -> tuple[int, bytes, bytes]:
    """The status of a command that reads `content`, what it wrote, and what it wrote of errors. `TimeoutError` if
    nothing is read or written for `idle_s`. If it is not awaited to its end, its process group is killed."""
    process = await _start(device, words, has_input=bool(content))
    try:
        async with asyncio.timeout(idle_s) as limit:
            output, errors = await _talk(process, content, lambda: _put_off(limit, idle_s))
            return await process.wait(), output, errors
    except BaseException:
        await _kill(process)
        raise


async def _start(device: str, words: Sequence[str], *, has_input: bool) -> asyncio.subprocess.Process:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    )
    try:
        # asyncio, cancelled here, would kill the process without its children, and wait for these to close its pipes.
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill_started)
        raise
    except (OSError, ValueError) as error:
        raise DeviceLost(f"{device}: cannot run {words[0]!r}: {error}") from None


def _kill_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _kill_group(starting.result())


async def _talk(
    process: asyncio.subprocess.Process, content: bytes, on_progress: Callable[[], None]
) -> tuple[bytes, bytes]:
    _, output, errors = await asyncio.gather(
        _write(process.stdin, content, on_progress),
        _read(process.stdout, on_progress),
        _read(process.stderr, on_progress),
    )
    return output, errors


def _put_off(limit: asyncio.Timeout, idle_s: float | None) -> None:
    if idle_s is not None:
        limit.reschedule(asyncio.get_running_loop().time() + idle_s)


async def _write(stream: asyncio.StreamWriter | None, content: bytes, on_progress: Callable[[], None]) -> None:
    if stream is None:
        return
    view = memoryview(content)
    # A process may end without reading all: its status tells why.
    with suppress(ConnectionError):
        for at in range(0, len(view), CHUNK):
            stream.write(view[at : at + CHUNK])
            await stream.drain()
            on_progress()
    stream.close()


async def _read(stream: asyncio.StreamReader | None, on_progress: Callable[[], None]) -> bytes:
    parts = []
    while stream is not None and (part := await stream.read(CHUNK)):
        parts.append(part)
        on_progress()
    return b"".join(parts)


async def _kill(process: asyncio.subprocess.Process) -> None:
    _kill_group(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_WAIT_S):
            await process.wait()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
