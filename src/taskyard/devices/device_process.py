"""Commands on this machine, each in a process group of its own that is killed as a whole."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from taskyard.devices.device_settings import LARGEST_OUTPUT, output_too_large
from taskyard.errors import DeviceError

CHUNK = 256 << 10
"""Bytes: what is written or read at once."""

KILL_WAIT_S = 5.0
"""Seconds: how long a killed process may take to end; one that the kernel blocks ends later."""


OWN_VARIABLES = "TASKYARD_"
"""How the names of our variables begin. `TASKYARD_STORE` may have the password of the store."""


class CannotStart(DeviceError):
    """The program of a command is missing or may not run."""


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a program of others: without our variables."""
    return {name: value for name, value in environ.items() if not name.startswith(OWN_VARIABLES)}


async def run_process(
    words: Sequence[str], content: bytes = b"", *, idle_s: float | None = None, most: int = LARGEST_OUTPUT
) -> tuple[int, bytes, bytes]:
    """The status of a command that reads `content`, what it wrote, and what it wrote of errors. `TimeoutError` if
    nothing is read or written for `idle_s`, `DeviceError` if it writes more than `most` bytes, `CannotStart` if it
    cannot be started. If it is not awaited to its end, its process group is killed."""
    process = await _start(words, has_input=bool(content))
    try:
        async with asyncio.timeout(idle_s) as limit:
            output, errors = await _talk(process, content, most, lambda: _put_off(limit, idle_s))
            return await process.wait(), output, errors
    except BaseException:
        await _kill(process)
        raise


async def _start(words: Sequence[str], *, has_input: bool) -> asyncio.subprocess.Process:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
    )
    try:
        # asyncio, cancelled here, would kill the process without its children, and wait for these to close its pipes.
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill_started)
        raise
    except ValueError as error:
        raise DeviceError(f"{words[-1][:80]!r} is no command: {error}") from None
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise DeviceError("the command is too long; push a script and run that") from None
        raise CannotStart(f"cannot run {words[0]!r}: {error}") from None


def _kill_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _kill_group(starting.result())


async def _talk(
    process: asyncio.subprocess.Process, content: bytes, most: int, on_progress: Callable[[], None]
) -> tuple[bytes, bytes]:
    reading = [asyncio.create_task(_read(stream, most, on_progress)) for stream in (process.stdout, process.stderr)]
    tasks = [asyncio.create_task(_write(process.stdin, content, on_progress)), *reading]
    try:
        await asyncio.gather(*tasks)
    finally:
        # A stream has one reader, and `_kill` is the next one.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return reading[0].result(), reading[1].result()


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


async def _read(stream: asyncio.StreamReader | None, most: int, on_progress: Callable[[], None]) -> bytes:
    content = bytearray()
    while stream is not None and (part := await stream.read(CHUNK)):
        content += part
        if len(content) > most:
            raise output_too_large(most)
        on_progress()
    return bytes(content)


async def _kill(process: asyncio.subprocess.Process) -> None:
    _kill_group(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_WAIT_S):
            # asyncio stops reading a full stream. Then it sees neither the end of the pipe nor that of the process.
            await asyncio.gather(_discard(process.stdout), _discard(process.stderr), process.wait())


async def _discard(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(CHUNK):
        pass


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
