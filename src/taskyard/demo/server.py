"""A small web server on this machine that compresses the files of a folder and sends them. It is a process of its own:
`python -m taskyard.demo.server FOLDER` prints its address, and ends when its standard input is closed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import zlib
from collections import Counter
from pathlib import Path

BLOCK = 64 * 1024
"""Bytes of a file that are read at once."""

REFUSALS = 2
"""How often a file under /busy/ is refused before it is served."""


class Server:
    """As much HTTP as the demo needs. It serves files under /files/, and refuses those under /busy/ at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests: Counter[str] = Counter()

    async def run(self) -> None:
        """Serve until standard input is closed, which also happens when the parent process dies."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201 - the tour reads it
        await asyncio.to_thread(sys.stdin.read)
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
            await self._answer(head.split()[1], writer)
        writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        self._requests[path] += 1
        file = self._folder / Path(path).name
        if path.startswith("/busy/") and self._requests[path] <= REFUSALS:
            writer.write(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
        elif not file.is_file():
            writer.write(b"HTTP/1.0 404 Not Found\r\n\r\n")
        else:
            writer.write(f"HTTP/1.0 200 OK\r\nX-Size: {file.stat().st_size}\r\n\r\n".encode())
            await self._send(file, writer)
        await writer.drain()

    async def _send(self, file: Path, writer: asyncio.StreamWriter) -> None:
        """Compress at the highest level, in a thread: the slow part of a download is real as well."""
        packer = zlib.compressobj(9)
        with file.open("rb") as source:
            while block := await asyncio.to_thread(source.read, BLOCK):
                packed = await asyncio.to_thread(packer.compress, block)
                writer.write(packed + packer.flush(zlib.Z_SYNC_FLUSH))
                await writer.drain()
        writer.write(packer.flush())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tour, which then closes the pipe
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(Server(Path(sys.argv[1])).run())
