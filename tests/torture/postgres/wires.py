"""The way between nodes and their server, which can swallow all that is sent over it, or carry it slowly.

A network of the test's own, whose link is taken down: packets vanish, and nobody is told. Where a process may not make
one, a proxy that reads and passes nothing on; slow is always the proxy.
"""

import asyncio
import ctypes
import os
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from taskyard.testing.postgres import Server


class Wire(Protocol):
    network: str
    """The name of the network in which nodes have to be, if any."""

    def address(self, url: str) -> str:
        """Where a node finds the database that is at `url` for us."""

    def cut(self) -> None: ...

    def mend(self) -> None: ...

    def close(self) -> None: ...


# --- a network of its own ---------------------------------------------------------------------------------------------


def enter(network: str) -> None:
    """Make this process, which has no other threads, one of that network."""
    if network:
        file = os.open(f"/run/netns/{network}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(file)


class Network:
    """Two ends of a cable: one here, with the server, and one in a namespace, with the nodes."""

    def __init__(self, server: Server) -> None:
        number = os.getpid()
        self.network = f"taskyard-{number}"
        self._here, self._there = f"ty{number}a", f"ty{number}b"
        # Of the addresses that are for measuring devices, and so for nobody's machines: a block of four for each of us.
        block = number % 16384 * 4
        prefix = f"198.{18 + block // 65536}.{block // 256 % 256}"
        self._ours, theirs = f"{prefix}.{block % 256 + 1}", f"{prefix}.{block % 256 + 2}"
        _ip("netns", "add", self.network)
        try:
            _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.network)
            _ip("address", "add", f"{self._ours}/30", "dev", self._here)
            _ip("link", "set", self._here, "up")
            _ip("-n", self.network, "address", "add", f"{theirs}/30", "dev", self._there)
            _ip("-n", self.network, "link", "set", self._there, "up")
            server.admit(f"{theirs}/32")
        except BaseException:
            self.close()
            raise

    def address(self, url: str) -> str:
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.replace(parts.hostname or "", self._ours)).geturl()

    def cut(self) -> None:
        _ip("link", "set", self._here, "down")

    def mend(self) -> None:
        _ip("link", "set", self._here, "up")

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._here)
        _ip("netns", "delete", self.network)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


# --- a proxy ----------------------------------------------------------------------------------------------------------


class Proxy:
    """Passes on what it reads, `delay_s` later; while it is cut, it reads and forgets. A connection that lost something
    stays broken: it is never passed on again, nor closed, until whoever made it gives it up."""

    network = ""

    def __init__(self, to_port: int) -> None:
        self._to = to_port
        self.port = 0
        self.held = 0
        """What it has read and not passed on."""
        self.delay_s = 0.0
        self._is_cut = False
        self._cuts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def address(self, url: str) -> str:
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{self.port}")).geturl()

    def cut(self) -> None:
        self._cuts += 1
        self._is_cut = True

    def slow(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def mend(self) -> None:
        self._is_cut, self.delay_s = False, 0.0

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # at the end: a server of Python 3.11 would print it as a failure
            await self._pass_on(near, back)

    async def _pass_on(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        if self._is_cut:
            while await near.read(65536):
                pass
            back.close()
            return
        try:
            far, forth = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            back.close()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(near, forth))
                both.create_task(self._carry(far, back))
        except* OSError:
            pass  # one of them is gone, and so the other
        finally:
            back.transport.abort()
            forth.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """What was under way when the wire was cut is lost as well."""
        loop = asyncio.get_running_loop()
        line: asyncio.Queue[tuple[float, int, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, cuts, data = await line.get()
                await asyncio.sleep(at - loop.time())
                self.held -= 1
                if self._is_cut or cuts != self._cuts:
                    await asyncio.Event().wait()  # for ever
                if not data:
                    raise ConnectionResetError
                target.write(data)
                await target.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(deliver())
            while True:
                data = await source.read(65536)
                self.held += 1
                await line.put((loop.time() + self.delay_s, -1 if self._is_cut else self._cuts, data))
                if not data:
                    break


def make_wire(server: Server) -> Wire:
    if os.geteuid() == 0 and shutil.which("ip") is not None and Path("/proc/self/ns/net").exists():
        with suppress(subprocess.CalledProcessError):
            return Network(server)
    return Proxy(server.port)
