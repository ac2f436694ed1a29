"""Connections that come back: a few at a time, opened when needed, dropped when in doubt, and never in a rush."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from taskyard.errors import StoreError, StoreUnavailable
from taskyard.stores.postgres.place import COMMAND_S, LOST, Connection, connect, typed_errors

APART_S = 0.55
"""Between two tries to connect while something is wrong: fewer than two a second, whatever wants a connection."""

CALM_AFTER_S = 10.0
"""So long after the last trouble connections are opened at once again."""


END_S = 5
"""How long the server may take to end a session of ours."""

Session = tuple[int, datetime]
"""The server's process behind a connection, and when it began: the number alone may stand for another one later."""


class Gate:
    """Lets through who wants to connect; in times of trouble one after the other, at least `APART_S` apart."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        lot: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._monotonic, self._lot, self._sleep = monotonic, lot, sleep
        self._next_mono = 0.0
        self._troubled_until = 0.0

    def trouble(self) -> None:
        self._troubled_until = self._monotonic() + CALM_AFTER_S

    async def enter(self) -> None:
        now = self._monotonic()
        if now >= self._troubled_until:
            self._next_mono = now
            return
        turn = max(now, self._next_mono)
        self._next_mono = turn + APART_S * (1 + self._lot())
        if turn > now:
            await self._sleep(turn - now)


class Links:
    """At most `most` connections at once, of which up to `keep` stay open; whoever comes first is served first.

    `ends_lost`: what was sent over a connection that was then lost takes effect before whatever is sent afterwards, or
    never. The server may not have noticed the loss, or not have read the statement: it is made to end that session
    before another one is used."""

    def __init__(
        self,
        url: str,
        gate: Gate,
        *,
        most: int,
        keep: int | None = None,
        settings: dict[str, str] | None = None,
        command_s: float = COMMAND_S,
        ends_lost: bool = False,
    ) -> None:
        self._url, self._gate, self._ends_lost = url, gate, ends_lost
        self._sessions: weakref.WeakKeyDictionary[Connection, Session] = weakref.WeakKeyDictionary()
        self._lost: list[Session] = []
        self._keep = most if keep is None else keep
        self._settings, self._command_s = settings, command_s
        self._room = asyncio.Semaphore(most)
        self._idle: list[Connection] = []
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
        await self._gate.enter()
        try:
            conn = await connect(self._url, settings=self._settings, command_s=self._command_s)
        except StoreError:
            self._gate.trouble()
            raise
        try:
            if self._ends_lost:
                await self._look_around(conn)
        except BaseException:
            self._gate.trouble()
            conn.terminate()
            raise
        return conn

    def _drop(self, conn: Connection) -> None:
        conn.terminate()
        if (session := self._sessions.pop(conn, None)) is not None:
            self._lost.append(session)

    async def _look_around(self, conn: Connection) -> None:
        with typed_errors(self._url):
            if (who := await conn.fetchrow(_WHO)) is not None:
                self._sessions[conn] = (who["pid"], who["backend_start"])
            while self._lost:
                if await conn.fetchval(_END, *self._lost[-1], END_S * 1000) is False:
                    raise StoreUnavailable("the server goes on with what a lost connection asked; it is tried again")
                self._lost.pop()

    async def _give_back(self, conn: Connection) -> None:
        if conn.is_closed():
            return
        if self._is_closed or len(self._idle) >= self._keep:
            await _close(conn)
        else:
            self._idle.append(conn)

    async def close(self) -> None:
        """Those in use are closed when they are given back."""
        self._is_closed = True
        while self._idle:
            await _close(self._idle.pop())


async def _close(conn: Connection) -> None:
    try:
        await conn.close(timeout=1.0)
    except LOST:
        conn.terminate()


_WHO = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_END = "SELECT pg_terminate_backend(pid, $3) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"
