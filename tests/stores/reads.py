"""How much the server has read for us."""

from __future__ import annotations

import asyncio
from collections.abc import Set

import asyncpg

OURS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'taskyard'"

READ = (
    "SELECT ((SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)"
    " + (SELECT sum(seq_tup_read) FROM pg_stat_user_tables))::bigint"
)


async def list_ours(conn: asyncpg.Connection) -> set[int]:
    """The connections that stores have to this database."""
    return {row["pid"] for row in await conn.fetch(OURS)}


async def read_since(conn: asyncpg.Connection, *, but: Set[int] = frozenset()) -> int:
    """Rows and entries that were read since this was last asked, over all connections of stores `but` these, when they
    are closed: it is then that they leave their counts."""
    while await list_ours(conn) - but:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    read: int = await conn.fetchval(READ)
    await conn.execute("SELECT pg_stat_reset()")
    return read
