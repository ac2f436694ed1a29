"""Connections that come back: a few at a time, opened when needed, dropped when in doubt."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from taskyard.stores.postgres.connection import COMMAND_S, Connection, Session, connect, find_session
from taskyard.stores.postgres.errors import LOST, typed_errors
from taskyard.stores.postgres.gate import Gate, Rank


class Links:
    """At most `most` connections at once, of which up to `keep` stay open; whoever comes first is served first.

    `ghosts` hears of the sessions whose connections were lost: the server may not have noticed, and go on with what it
    was asked there."""

    def __init__(
        self,
        url: str,
        gate: Gate,
        *,
        most: int,
        keep: int | None = None,
        rank: Rank = Rank.WORK,
        settings: dict[str, str] | None = None,
        command_s: float = COMMAND_S,
        ghosts: set[Session] | None = None,
    ) -> None:
        self._url, self._gate, self._rank, self._ghosts = url, gate, rank, ghosts
        self._sessions: weakref.WeakKeyDictionary[Connection, Session] = weakref.WeakKeyDictionary()
        self._keep = most if keep is None else keep
        self._settings, self._command_s = settings, command_s
        self._room = asyncio.Semaphore(most)
        self._idle: list[Connection] = []
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._opening: asyncio.Task[None] | None = None
        self._is_closed = False

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """A connection for one statement, or for one transaction. After an error that leaves it in doubt, and when
        whoever used it was cancelled, it is not used again."""
        async with self._room:
            conn = await self._take()
            try:
                yield conn
            except BaseException as exc:
                if not isinstance(exc, Exception):
                    self._drop(conn)
                elif isinstance(exc, LOST) or isinstance(exc.__cause__, LOST):  # which has got a name of ours by now
                    self._gate.trouble()
                    self._drop(conn)
                raise
            finally:
                await self._give_back(conn)

    async def _take(self) -> Connection:
        while self._idle:
            conn = self._idle.pop()
            if not conn.is_closed():
                return conn
            self._gate.trouble()
        return await (self._share() if self._gate.is_troubled else self._open())

    async def _share(self) -> Connection:
        """In times of trouble, of all who need a connection here only one goes to the gate, for all of them: they take
        what it brings, or what is given back meanwhile, one after the other; and they fail together."""
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open_for_all())
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:
                await self._give_back(waiter.result())
            raise

    async def _open_for_all(self) -> None:
        try:
            while any(not waiter.done() for waiter in self._waiting):
                await self._give_back(await self._open())
        except Exception as error:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_exception(error)
            self._waiting.clear()
        finally:
            self._opening = None

    async def _open(self) -> Connection:
        return await self._gate.connect(self._connect, self._rank)

    async def _connect(self) -> Connection:
        conn = await connect(self._url, settings=self._settings, command_s=self._command_s)
        try:
            if self._ghosts is not None:
                with typed_errors(self._url):
                    self._sessions[conn] = await find_session(conn)
        except BaseException:
            conn.terminate()
            raise
        return conn

    def _drop(self, conn: Connection) -> None:
        conn.terminate()
        if self._ghosts is not None and conn in self._sessions:
            self._ghosts.add(self._sessions[conn])

    async def _give_back(self, conn: Connection) -> None:
        if conn.is_closed():
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(conn)
                return
        if self._is_closed or len(self._idle) >= self._keep:
            await _close(conn)
        else:
            self._idle.append(conn)

    async def close(self) -> None:
        """Those in use are closed when they are given back."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        while self._idle:
            await _close(self._idle.pop())


async def _close(conn: Connection) -> None:
    try:
        await conn.close(timeout=1.0)
    except LOST:
        conn.terminate()
