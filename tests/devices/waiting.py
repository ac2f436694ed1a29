"""Waiting for what other processes do."""

import asyncio
import os

from taskyard.testing.adb_server import AdbServer

PATIENCE_S = 30.0
"""Seconds: what anything may take on a busy machine."""


async def process_ended(pid: int) -> None:
    """Return when it runs no more; one that nobody has waited for yet does not run."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


async def adb_state(server: AdbServer, serial: str, state: str) -> None:
    """Return when this server shows the phone in this state; it tells of each change."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(b"0012host:track-devices")
            assert await reader.readexactly(4) == b"OKAY"
            while True:
                length = int(await reader.readexactly(4), 16)
                if f"{serial}\t{state}" in (await reader.readexactly(length)).decode():
                    return
        finally:
            writer.close()
