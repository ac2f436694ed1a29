"""Runs that a test holds by the hand: each says over a loopback socket that it began, and does what the test tells it.

The same in this process and in another, on the loop and in a thread, so that one test can look at all of them. A run
that ends, by itself, by a cancel or because its process was killed, closes its connection, and the test sees that too.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from taskyard import Cancel, Event, EventKind, RetryLater, RunContext, Yard, current_run

PATIENCE_S = 20.0
"""What does not happen within this time will not happen: only a failing test ever waits so long."""

RAISES: dict[str, type[BaseException]] = {
    name: error
    for error in (ValueError, TypeError, FileNotFoundError, ImportError, OSError, PermissionError, RuntimeError)
    for name in [error.__name__]
}


class MyError(ValueError):
    """A consumer's own error, of a class that is given up on."""


RAISES["MyError"] = MyError


# --- inside the run ---------------------------------------------------------------------------------------------------


def hello(run: RunContext, name: str) -> bytes:
    said = {"name": name, "uuid": run.uuid, "attempt": run.attempt, "token": run.token, "pid": os.getpid()}
    return json.dumps(said).encode() + b"\n"


def obey(run: RunContext, line: bytes) -> tuple[bool, Any]:
    """Do what one line says: whether the run ends, and with what."""
    if not line:
        raise RuntimeError("the test is gone")
    match json.loads(line):
        case {"finish": value}:
            return True, value
        case {"raise": name, "text": text}:
            raise RAISES[name](text)
        case {"later": delay_s}:
            raise RetryLater(delay_s, "not yet")
        case {"give_up": reason}:
            raise Cancel(reason)
        case {"progress": fraction, "message": message, "rate": rate}:
            run.progress(fraction, message, rate)
        case {"note": text}:
            run.note(text)
    return False, None


async def attend(port: int, name: str) -> Any:
    """The whole of an async consumer."""
    run = current_run()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(hello(run, name))
        while True:
            is_over, value = obey(run, await reader.readline())
            if is_over:
                # Not over until the test knows: what begins next must never seem to have run beside this one.
                writer.write(b"bye\n")
                await reader.readline()
                return value
    finally:
        writer.close()


def attend_in_thread(port: int, name: str) -> Any:
    """The whole of a sync consumer. Each time it is told something it looks whether it should end."""
    run = current_run()
    with socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("rb") as lines:
        sock.sendall(hello(run, name))
        while True:
            is_over, value = obey(run, lines.readline())
            if is_over or run.cancelled:
                sock.sendall(b"bye\n")
                lines.readline()
                if is_over:
                    return value
                raise Cancel("it saw that it should end")


# --- in the test ------------------------------------------------------------------------------------------------------


class Visit:
    """One run, while it lasts."""

    def __init__(self, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.name: str = said["name"]
        self.uuid: str = said["uuid"]
        self.attempt: int = said["attempt"]
        self.token: int = said["token"]
        self.pid: int = said["pid"]
        self._writer = writer
        self._gone = asyncio.Event()

    def __repr__(self) -> str:
        return f"<run {self.attempt} of {self.name}>"

    def _tell(self, **order: Any) -> None:
        self._writer.write(json.dumps(order).encode() + b"\n")

    def finish(self, value: Any = None) -> None:
        self._tell(finish=value)

    def fail(self, error: str = "RuntimeError", text: str = "as told") -> None:
        self._tell(**{"raise": error, "text": text})

    def later(self, delay_s: float) -> None:
        self._tell(later=delay_s)

    def give_up(self, reason: str) -> None:
        self._tell(give_up=reason)

    def progress(self, fraction: float, message: str = "", rate: float | None = None) -> None:
        self._tell(progress=fraction, message=message, rate=rate)

    def note(self, text: str) -> None:
        self._tell(note=text)

    def look(self) -> None:
        self._tell(look=True)

    def leave(self) -> None:
        self._gone.set()

    @property
    def is_going_on(self) -> bool:
        return not self._gone.is_set()

    async def gone(self) -> None:
        """Wait until its code has ended, in whatever way."""
        async with asyncio.timeout(PATIENCE_S):
            await self._gone.wait()


class Gates:
    """Every run that has called at `port`, in the order they began."""

    def __init__(self) -> None:
        self.port = 0
        self.visits: list[Visit] = []
        self.most_at_once = 0
        self._unseen: list[Visit] = []
        self._changed = asyncio.Condition()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = b""
        with suppress(ConnectionResetError):
            line = await reader.readline()
        if not line.endswith(b"\n"):  # its process was killed before it had said who it is
            writer.close()
            return
        visit = Visit(json.loads(line), writer)
        async with self._changed:
            self.visits.append(visit)
            self._unseen.append(visit)
            self.most_at_once = max(self.most_at_once, len(self.going_on))
            self._changed.notify_all()
        with suppress(ConnectionResetError):  # its process was killed
            await reader.readline()
        visit.leave()
        if not writer.is_closing():
            writer.write(b"bye\n")
        writer.close()

    @property
    def going_on(self) -> list[Visit]:
        return [visit for visit in self.visits if visit.is_going_on]

    @property
    def names(self) -> list[str]:
        """What has begun so far."""
        return [visit.name for visit in self.visits]

    async def next(self) -> Visit:
        """The next run that begins, or has begun unseen."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self._unseen)
            return self._unseen.pop(0)

    async def begun(self, name: str) -> Visit:
        """The same, which must be the run of this name."""
        visit = await self.next()
        assert visit.name == name, f"{visit.name} began, {name} was expected"
        return visit


@asynccontextmanager
async def open_gates() -> AsyncIterator[Gates]:
    gates = Gates()
    server = await asyncio.start_server(gates._welcome, "127.0.0.1", 0)
    gates.port = server.sockets[0].getsockname()[1]
    try:
        yield gates
    finally:
        server.close()
        for visit in gates.going_on:
            visit._writer.close()


# --- what the yard says -----------------------------------------------------------------------------------------------


async def heard(yard: Yard, kind: EventKind, uuid: str | None = None, *, times: int = 1, after: int = 0) -> Event:
    """Wait for the event, or find it in the past: of one task or any, the first of its kind or a later one."""
    async with asyncio.timeout(PATIENCE_S), aclosing(yard.events(after=after)) as events:
        async for event in events:
            if event.kind is kind and uuid in (None, event.uuid):
                times -= 1
                if times == 0:
                    return event
    raise AssertionError("the events ended")


async def told(yard: Yard, uuid: str) -> list[EventKind]:
    """Everything that has happened to a task so far, but progress."""
    events = (await yard.store.events(after=0, limit=10_000)).events
    return [event.kind for event in events if event.uuid == uuid and event.kind is not EventKind.PROGRESS]


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_so():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)


async def until_node(yard: Yard, *, serves: str | None = None, lacks: str | None = None) -> None:
    """Return when the nodes on the store say that they serve this, or no longer that."""

    async def is_so() -> bool:
        sources = {source for status in await yard.store.nodes() for source in status.node.consumers}
        return (serves is None or serves in sources) and lacks not in sources

    await until(is_so)
