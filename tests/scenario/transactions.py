"""A user's own transactions, over each driver that a task can be submitted through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Theirs:
    """A connection of the user's: what `submit` is given, how he writes himself, and his savepoints."""

    connection: Any
    write: Callable[[str], Awaitable[Any]]
    savepoint: Callable[[], AbstractAsyncContextManager[Any]]


class Undo(Exception):
    """Rolls a block back."""


@asynccontextmanager
async def undone(block: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """The same block, rolled back at its end."""
    with suppress(Undo):
        async with block as inside:
            yield inside
            raise Undo


Transaction = Callable[[str], AbstractAsyncContextManager[Theirs]]
"""A block that is one transaction on the database at an address: committed at its end, rolled back by an exception."""


@asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[Theirs]:
    conn = await asyncpg.connect(url)
    try:
        async with conn.transaction():
            yield Theirs(conn, conn.execute, conn.transaction)
    finally:
        await conn.close()


@asynccontextmanager
async def by_pool(url: str) -> AsyncIterator[Theirs]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as conn, conn.transaction():
        yield Theirs(conn, conn.execute, conn.transaction)


@asynccontextmanager
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), poolclass=NullPool)
    try:
        yield made
    finally:
        await made.dispose()


def _sqlalchemy(connection: AsyncConnection | AsyncSession) -> Theirs:
    return Theirs(connection, lambda sql: connection.execute(text(sql)), connection.begin_nested)


@asynccontextmanager
async def by_sqlalchemy_connection(url: str) -> AsyncIterator[Theirs]:
    async with engine(url) as made, made.begin() as connection:
        yield _sqlalchemy(connection)


@asynccontextmanager
async def by_sqlalchemy_session(url: str) -> AsyncIterator[Theirs]:
    async with engine(url) as made, AsyncSession(made) as session, session.begin():
        yield _sqlalchemy(session)


DRIVERS: dict[str, Transaction] = {
    "asyncpg": by_asyncpg,
    "pool": by_pool,
    "sqlalchemy-connection": by_sqlalchemy_connection,
    "sqlalchemy-session": by_sqlalchemy_session,
}
