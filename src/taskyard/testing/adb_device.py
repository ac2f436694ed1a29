"""An emulated Android device that speaks the protocol of adb devices on a loopback port, with a simulated phone behind
it: `adb connect` reaches it through the real adb server. It has what adapters and `adb` use: shells, `exec`, file sync
and reboot.

Messages have a header of six numbers (command, two arguments, length, checksum, magic) and data. The host opens
streams; on each, a side sends one message and waits until the other has acknowledged it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from typing import Literal

from taskyard.devices.simulated import SimulatedDevice
from taskyard.devices.simulated_shell import ShellResult
from taskyard.errors import DeviceError, DeviceLost

_HEADER = struct.Struct("<6I")
_SYNC = struct.Struct("<4sI")

VERSION = 0x01000001
"""The protocol from Android 9 on, which has no checksums."""

LARGEST_DATA = 1 << 20
"""Bytes of a message, the most that adb takes."""

LARGEST_CHUNK = 64 << 10
"""Bytes of a chunk of a file, the most that adb takes."""

AUTH_TOKEN, AUTH_SIGNATURE, AUTH_PUBLIC_KEY = 1, 2, 3

Auth = Literal["none", "accepted", "unauthorized"]
"""Whether it asks the host for its key, and whether a person has allowed that key."""


def _code(name: str) -> int:
    return int.from_bytes(name.encode(), "little")


CNXN, AUTH, OPEN, OKAY, CLSE, WRTE = map(_code, ("CNXN", "AUTH", "OPEN", "OKAY", "CLSE", "WRTE"))


class EmulatedAdbDevice:
    """The device: `async with EmulatedAdbDevice(phone) as device`, and then `adb connect` to `device.serial`."""

    def __init__(self, phone: SimulatedDevice, *, auth: Auth = "none", has_shell_v2: bool = True) -> None:
        self.phone, self.auth = phone, auth
        self.features = "shell_v2,cmd" if has_shell_v2 else "cmd"
        self.port = 0
        self.booting: asyncio.Task[None] | None = None
        self._port_keeper: socket.socket | None = None
        """Bound and not listening: nothing else gets the port while the device refuses connections."""
        self._listening: asyncio.Task[None] | None = None
        self._open_link: int | None = None
        """The link of the phone that it listens for; None while it refuses connections."""
        self._changed = asyncio.Event()
        self._transports: set[asyncio.Task[None]] = set()

    @property
    def serial(self) -> str:
        """As adb names it."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> EmulatedAdbDevice:
        self._port_keeper = socket.socket()
        self._port_keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port_keeper.bind(("127.0.0.1", self.port))
        self.port = self._port_keeper.getsockname()[1]
        self._listening = asyncio.create_task(self._listen())
        self._listening.add_done_callback(lambda _: self._changed.set())
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._listening, self.booting, *self._transports) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._port_keeper is not None:
            self._port_keeper.close()

    async def settled(self) -> None:
        """Return when it takes connections, or refuses them, as its phone does now. It follows a moment after controls
        such as `disconnect` and `reconnect`, and a host that tries meanwhile meets what was before."""
        while self._open_link != (self.phone.link if self.phone.is_connectable else None):
            self._changed.clear()
            await self._changed.wait()
            if self._listening is not None and self._listening.done():
                self._listening.result()  # why it cannot listen

    async def _listen(self) -> None:
        """Refuse connections while the phone takes none: adb waits for 10 s if one is closed before it has begun."""
        while True:
            await self.phone.connectable()
            link = self.phone.link
            server = await asyncio.start_server(
                self._serve, "127.0.0.1", self.port, reuse_port=True, start_serving=False
            )
            try:
                # Race: the phone may have gone again during the await above. From here on nothing comes between.
                if link == self.phone.link:
                    self._follow(link)
                    await server.start_serving()
                await self.phone.broken(link)
            finally:
                server.close()
                self._follow(None)

    def _follow(self, link: int | None) -> None:
        self._open_link = link
        self._changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._transports.add(task)
        try:
            await _Transport(self, reader, writer).run()
        except (ConnectionError, asyncio.IncompleteReadError, DeviceLost):
            pass
        except asyncio.CancelledError:
            # Only `__aexit__` cancels; asyncio would log it as an error of this callback.
            pass
        finally:
            self._transports.discard(task)
            writer.close()


class _Transport:
    """A connection of an adb server."""

    def __init__(self, device: EmulatedAdbDevice, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.phone = device.phone
        self.link = -1
        self._device, self._reader, self._writer = device, reader, writer
        self._streams: dict[int, _Stream] = {}
        self._last_id = 0

    async def run(self) -> None:
        """Serve it until the host goes, or until the phone breaks its connections."""
        await self._shake_hands()
        ends = [asyncio.create_task(self._serve()), asyncio.create_task(self.phone.broken(self.link))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [*ends, *(stream.task for stream in self._streams.values() if stream.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, command: int, first: int, second: int, data: bytes = b"") -> None:
        self._writer.write(_HEADER.pack(command, first, second, len(data), 0, command ^ 0xFFFFFFFF) + data)

    async def _receive(self) -> tuple[int, int, int, bytes]:
        command, first, second, length, _, _ = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        return command, first, second, await self._reader.readexactly(length)

    async def _shake_hands(self) -> None:
        command, *_ = await self._receive()
        if command != CNXN:
            raise ConnectionError("the host does not speak the protocol of adb devices")
        self.link = await self.phone.connect()
        auth = self._device.auth
        if auth != "none":
            await self._ask_for_key()
        if auth == "unauthorized":
            # Nobody allows it: the host waits, and shows the device as unauthorized.
            await self.phone.broken(self.link)
        banner = (
            f"device::ro.product.name={self.phone.name};ro.product.model=simulated;features={self._device.features}"
        )
        self.send(CNXN, VERSION, LARGEST_DATA, banner.encode())

    async def _ask_for_key(self) -> None:
        """Accept no signature, so that the host sends its public key, as to a phone that does not know it."""
        while True:
            self.send(AUTH, AUTH_TOKEN, 0, os.urandom(20))
            command, kind, _, _ = await self._receive()
            if command == AUTH and kind == AUTH_PUBLIC_KEY:
                return

    async def _serve(self) -> None:
        while True:
            command, remote, local, data = await self._receive()
            stream = self._streams.get(local)
            if command == OPEN:
                self._open(remote, data.rstrip(b"\0").decode())
            elif stream is None:
                continue  # It was closed meanwhile.
            elif command == OKAY:
                stream.acknowledged.set()
            elif command == WRTE:
                stream.feed(data)
                self.send(OKAY, local, remote)
            elif command == CLSE:
                stream.close()

    def _open(self, remote: int, service: str) -> None:
        self._last_id += 1
        stream = self._streams[self._last_id] = _Stream(self, self._last_id, remote)
        stream.task = asyncio.create_task(self._run_service(stream, service))

    async def _run_service(self, stream: _Stream, service: str) -> None:
        name, _, argument = service.partition(":")
        run = _SERVICES.get(name.partition(",")[0])
        try:
            await self.phone.answer(self.link, latency_s=0.0)
            if run is None:
                return
            self.send(OKAY, stream.local, stream.remote)
            await run(stream, f"{name}:", argument)
        except DeviceLost:
            pass  # The transport ends too.
        finally:
            self.send(CLSE, stream.local, stream.remote)
            del self._streams[stream.local]

    def reboot(self) -> None:
        # The reference keeps the task alive; it outlives this transport, which breaks at once.
        self._device.booting = asyncio.create_task(self.phone.reboot())


class _Stream:
    """A stream that the host has opened."""

    def __init__(self, transport: _Transport, local: int, remote: int) -> None:
        self.transport, self.phone = transport, transport.phone
        self.local, self.remote = local, remote
        self.acknowledged = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._incoming = asyncio.StreamReader()

    def feed(self, data: bytes) -> None:
        self._incoming.feed_data(data)

    def close(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def read(self, size: int) -> bytes:
        return await self._incoming.readexactly(size)

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), LARGEST_DATA):
            self.acknowledged.clear()
            self.transport.send(WRTE, self.local, self.remote, data[start : start + LARGEST_DATA])
            await self.acknowledged.wait()

    async def run(self, command: str) -> ShellResult:
        try:
            return await self.phone.run(self.transport.link, command)
        except DeviceLost:
            raise
        except DeviceError as error:
            return ShellResult(1, b"", f"{error}\n".encode())


# --- services ---------------------------------------------------------------------------------------------------------


async def _shell(stream: _Stream, options: str, command: str) -> None:
    result = await stream.run(command)
    if not options.startswith("shell,v2"):
        await stream.write(result.stdout + result.stderr)
        return
    packets = [(1, result.stdout), (2, result.stderr), (3, bytes([result.status]))]
    await stream.write(b"".join(struct.pack("<BI", kind, len(data)) + data for kind, data in packets if data))


async def _exec(stream: _Stream, _: str, command: str) -> None:
    result = await stream.run(command)
    await stream.write(result.stdout + result.stderr)


async def _reboot(stream: _Stream, _: str, __: str) -> None:
    stream.transport.reboot()


async def _sync(stream: _Stream, _: str, __: str) -> None:
    """Files: requests of a name and a length, each with a path, until the host quits."""
    while True:
        name, length = _SYNC.unpack(await stream.read(_SYNC.size))
        if name == b"QUIT":
            return
        path = (await stream.read(length)).decode()
        if name == b"SEND":
            await _take_file(stream, path.rpartition(",")[0])
            continue
        await stream.phone.call(stream.transport.link, "pull")
        if name == b"STAT":
            await stream.write(_stat(stream, path))
        elif name == b"RECV":
            await _give_file(stream, path)
        else:
            await _refuse(stream, f"unknown request {name!r}")
            return


def _stat(stream: _Stream, path: str) -> bytes:
    content = stream.phone.phone.read(path)
    if content is None:
        return struct.pack("<4s3I", b"STAT", 0, 0, 0)
    return struct.pack("<4s3I", b"STAT", stat.S_IFREG | 0o644, len(content), 1)


async def _take_file(stream: _Stream, path: str) -> None:
    parts = []
    while True:
        name, length = _SYNC.unpack(await stream.read(_SYNC.size))
        if name == b"DONE":  # Its length is the time of the file.
            break
        parts.append(await stream.read(length))
    try:
        await stream.phone.call(stream.transport.link, "push")
    except DeviceLost:
        raise
    except DeviceError as error:
        await _refuse(stream, str(error))
        return
    if not path.startswith("/"):
        await _refuse(stream, "Read-only file system")
        return
    stream.phone.phone.write(path, b"".join(parts))
    await stream.write(_SYNC.pack(b"OKAY", 0))


async def _give_file(stream: _Stream, path: str) -> None:
    content = stream.phone.phone.read(path)
    if content is None:
        await _refuse(stream, f"open failed: No such file or directory: {path}")
        return
    chunks = [content[start : start + LARGEST_CHUNK] for start in range(0, len(content), LARGEST_CHUNK)]
    await stream.write(b"".join(_SYNC.pack(b"DATA", len(chunk)) + chunk for chunk in chunks) + _SYNC.pack(b"DONE", 0))


async def _refuse(stream: _Stream, message: str) -> None:
    await stream.write(_SYNC.pack(b"FAIL", len(message.encode())) + message.encode())


_SERVICES: dict[str, Callable[[_Stream, str, str], Awaitable[None]]] = {
    "exec": _exec,
    "reboot": _reboot,
    "shell": _shell,
    "sync": _sync,
}
