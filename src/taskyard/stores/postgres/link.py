"""Connections that come back: a few at a time, opened when needed, dropped when in doubt, and never in a rush."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from taskyard.errors import StoreError
from taskyard.stores.postgres.place import COMMAND_S, LOST, Connection, Session, connect, find_session, typed_errors

APART_S = 0.55
"""Between two tries to connect while something is wrong: fewer than two a second, whatever wants a connection."""

CALM_AFTER_S = 10.0
"""So long after the last trouble connections are opened at once again."""


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

    `ghosts` hears of the sessions whose connections were lost: the server may not have noticed, and go on with what it
    was asked there."""

    def __init__(
        self,
        url: str,
        gate: Gate,
        *,
        most: int,
        keep: int | None = None,
        settings: dict[str, str] | None = None,
        command_s: float = COMMAND_S,
        ghosts: set[Session] | None = None,
    ) -> None:
        self._url, self._gate, self._ghosts = url, gate, ghosts
        self._sessions: weakref.WeakKeyDictionary[Connection, Session] = weakref.WeakKeyDictionary()
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
            if self._ghosts is not None:
                with typed_errors(self._url):
                    self._sessions[conn] = await find_session(conn)
        except BaseException:
            self._gate.trouble()
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
