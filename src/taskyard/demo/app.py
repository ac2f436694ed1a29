"""The demo's yard: six consumers that do real work. `taskyard worker taskyard.demo.app:yard --store sqlite:///…` runs
what a tour has left."""

from __future__ import annotations

import asyncio
import hashlib
import lzma
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from taskyard import Cancel, RetryPolicy, Yard, current_run

BLOCK = 64 * 1024
"""Bytes: a run checks after each block whether it should stop. The slowest packer takes about 50 ms for one."""

yard = Yard()


class Busy(Exception):
    """The server is busy: try again later."""


@yard.consumer(name="hash", concurrency=2)
def hash_file(path: str) -> dict[str, Any]:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    for block in _blocks(Path(path)):
        digest.update(block)
    return {"file": Path(path).name, "sha256": digest.hexdigest()[:16]}


@yard.consumer(concurrency=2)
def compress(path: str, method: str = "lzma") -> dict[str, Any]:
    """Compress a file into a copy beside it. The run checks at every block whether it should stop."""
    source, packer = Path(path), _packer(method)
    target = source.with_suffix(f".{method}")
    try:
        with target.open("wb") as out:
            for block in _blocks(source):
                out.write(packer.compress(block))
            out.write(packer.flush())
    except Cancel:
        target.unlink()
        raise
    before, after = source.stat().st_size, target.stat().st_size
    return {"file": target.name, "saved": f"{1 - after / before:.0%}"}


@yard.consumer(concurrency=3, retry=RetryPolicy(max_retries=5, first_s=1.5, factor=1.5))
async def fetch(url: str) -> dict[str, Any]:
    """Download from the demo's own server, which compresses what it sends; `Busy` on a 503."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {parts.path} HTTP/1.0\r\nHost: {parts.hostname}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if " 503 " in head.partition("\r\n")[0]:
            raise Busy("the server answered 503 Service Unavailable")
        total = int(head.partition("X-Size: ")[2].partition("\r\n")[0])
        unpacker, meter, received = zlib.decompressobj(), Meter(total), 0
        while packed := await reader.read(BLOCK):
            received += len(unpacker.decompress(packed))
            meter.reached(received)
    finally:
        writer.close()
    return {"url": parts.path, "bytes": received}


@yard.consumer(concurrency=4)
def ledger(book: str, entry: str) -> dict[str, Any]:
    """Add a line that contains the hash of the line before it. Two runs at once would break the chain, so all entries
    of a book are submitted with the same key."""
    path = Path(book)
    lines = path.read_text().splitlines() if path.exists() else []
    before = lines[-1].split()[0] if lines else "0" * 12
    chained = hashlib.sha256(f"{before} {entry}".encode()).hexdigest()[:12]
    with path.open("a") as out:
        out.write(f"{chained} {entry}\n")
    return {"line": len(lines) + 1, "entry": entry, "hash": chained}


@yard.consumer
def inventory(folder: str) -> dict[str, Any]:
    """Count the files of a folder, and their bytes."""
    files = [file for file in Path(folder).iterdir() if file.is_file()]
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


@yard.consumer
def verify(path: str, sha256: str) -> None:
    """Fails, for good, if the file is not what it should be."""
    found = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    if found != sha256:
        raise ValueError(f"{Path(path).name} has the checksum {found}, but should have {sha256}")


# --- progress ---------------------------------------------------------------------------------------------------------


class Meter:
    """Reports the run's progress in megabytes."""

    def __init__(self, total: int) -> None:
        self._total, self._began = max(1, total), time.monotonic()

    def reached(self, count: int) -> None:
        seconds = time.monotonic() - self._began
        rate = count / 1e6 / seconds if seconds > 0.05 else None
        message = f"{count / 1e6:.1f} of {self._total / 1e6:.1f} MB"
        current_run().progress(count / self._total, message, rate)


class Packer(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _packer(method: str) -> Packer:
    if method == "lzma":
        return lzma.LZMACompressor(preset=4)
    if method == "lzma9":
        return lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    if method == "zlib":
        return zlib.compressobj(9)
    raise ValueError(f"there is no method {method!r}; use lzma, lzma9 or zlib")


def _blocks(path: Path) -> Iterator[bytes]:
    """The file, block by block, until the end or until the run should end."""
    meter, done = Meter(path.stat().st_size), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if current_run().cancelled:
                raise Cancel(f"stopped after {done / 1e6:.1f} MB")
            yield block
            done += len(block)
            meter.reached(done)
