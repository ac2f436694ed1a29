"""One PostgreSQL database, as the parts of the store ask it: the connections, who is in flight, what is tried again.

Invariants: whatever is asked between `asked` and its end is waited for by `finish`. Nothing is asked while a session of
ours may be left on the server with which the connection was lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import asyncpg

from taskyard.errors import ForkedStore, NotOpen, StoreError, StoreUnavailable, hide_password
from taskyard.stores.postgres import reader
from taskyard.stores.postgres.connection import COMMAND_S, PLANS, READS, Connection, Session, committing
from taskyard.stores.postgres.errors import busy, is_replaced, typed_errors
from taskyard.stores.postgres.gate import Gate
from taskyard.stores.postgres.hints import Hints
from taskyard.stores.postgres.link import Links
from taskyard.stores.postgres.patience import TRIES, give_way

T = TypeVar("T")


class Database:
    """`turns` are the connections for turns, `reads` those for reading, of which `pool_size` are kept open and
    `pool_overflow` more are opened while all of them are busy; `hints` tells other processes, and hears of them."""

    turns: Links
    reads: Links
    hints: Hints

    def __init__(self, url: str, *, command_s: float = COMMAND_S, pool_size: int, pool_overflow: int) -> None:
        self.url = url
        self._command_s = command_s
        self._pool_size, self._pool_overflow = pool_size, pool_overflow
        self._pid = 0
        self.is_open = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._where = ""
        self._ghosts: set[Session] = set()
        """Sessions with which the connection was lost."""

    # --- opening and closing ------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._pid = os.getpid()
        gate = Gate()
        links = partial(Links, self.url, gate, command_s=self._command_s)
        plans = committing(PLANS, command_s=self._command_s)
        self.turns = links(most=2, settings=plans, ghosts=self._ghosts)  # ends and claims
        self._writes = links(most=2, settings=plans, ghosts=self._ghosts)
        self.reads = links(most=self._pool_size + self._pool_overflow, keep=self._pool_size, settings=READS)
        self.hints = Hints(self.url, gate, self.reads)
        self.is_open = True

    async def finish(self) -> None:
        """Let nobody ask any more, and wait for what was asked before."""
        self.is_open = False
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        await self.hints.close()  # not sooner: what was in flight tells of itself

    async def close(self) -> None:
        for links in (self.turns, self._writes, self.reads):
            await links.close()

    # --- asking -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Closing waits for what was asked before."""
        if not self.is_open:
            raise NotOpen("the store is not open; use it inside `async with yard`")
        if os.getpid() != self._pid:
            raise ForkedStore
        self._in_flight += 1
        try:
            if self._ghosts:
                await self._lay_ghosts()
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _lay_ghosts(self) -> None:
        """Race: what was sent over a lost connection may still be on its way to the server, or wait there for a lock.
        What it claims after we have looked, nobody would run. So its session is ended, with all that it has not done
        yet, before anything else is asked."""
        within_ms = int(self._command_s * 500)
        for session in list(self._ghosts):
            if not await self.read(partial(reader.end_session, session=session, within_ms=within_ms)):
                pid, _ = session
                raise StoreUnavailable(f"a session of ours (pid {pid}) on {hide_password(self.url)} does not end")
            self._ghosts.discard(session)

    async def write(self, sql: str, *arguments: Any) -> Any:
        """The row that a call answers with. What another transaction got in the way of is tried again."""
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            try:
                async with self._writes.use() as conn:
                    with typed_errors(self.url, writes=True):
                        return await conn.fetchrow(sql, *arguments)
            except StoreError as error:
                if not isinstance(error.__cause__, asyncpg.TransactionRollbackError) and not is_replaced(
                    error.__cause__, n
                ):
                    raise
        raise busy(self.url)

    async def read(self, run: Callable[[Connection], Awaitable[T]]) -> T:
        """What `run` reads. It runs again if the SQL bundle is replaced meanwhile."""
        n = 0
        while True:
            try:
                async with self.reads.use() as conn:
                    with typed_errors(self.url):
                        return await run(conn)
            except StoreError as error:
                if not is_replaced(error.__cause__, n):
                    raise
            n += 1

    async def ask(self, run: Callable[[Connection], Awaitable[T]]) -> T:
        async with self.asked():
            return await self.read(run)

    async def find_where(self) -> str:
        """Which database this is."""
        if not self._where:
            self._where = await self.read(lambda conn: conn.fetchval("SELECT taskyard.database_identity_1()"))
        return self._where
