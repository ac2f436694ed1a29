"""What the demo works on: files of text, and a web server on this machine that packs and sends them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from taskyard.cli.demo.work import BLOCK

REFUSALS = 2
"""How often a file under /busy/ is refused before it is served."""


def write_text(path: Path, size: int) -> None:
    """A file of about `size` bytes of words, the same every time: it packs as well as prose does."""
    drawn = random.Random(path.name)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(4000)]
    with path.open("w") as out:
        for written in range(0, size, BLOCK):
            out.write(" ".join(drawn.choices(words, k=BLOCK // 4))[: min(BLOCK, size - written)])


class Server:
    """As much HTTP as the demo needs. Files under /files/ are served, those under /busy/ refused at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: Counter[str] = Counter()
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
            await self._answer(head.split()[1], writer)
        writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        self._asked[path] += 1
        file = self._folder / Path(path).name
        if path.startswith("/busy/") and self._asked[path] <= REFUSALS:
            writer.write(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
        elif not file.is_file():
            writer.write(b"HTTP/1.0 404 Not Found\r\n\r\n")
        else:
            writer.write(f"HTTP/1.0 200 OK\r\nX-Size: {file.stat().st_size}\r\n\r\n".encode())
            await self._send(file, writer)
        await writer.drain()

    async def _send(self, file: Path, writer: asyncio.StreamWriter) -> None:
        """Packed at the highest level, in a thread: the slow part of a download is real as well."""
        packer = zlib.compressobj(9)
        with file.open("rb") as source:
            while block := await asyncio.to_thread(source.read, BLOCK):
                packed = await asyncio.to_thread(packer.compress, block)
                writer.write(packed + packer.flush(zlib.Z_SYNC_FLUSH))
                await writer.drain()
        writer.write(packer.flush())
