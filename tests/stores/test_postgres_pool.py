"""How many connections a store on PostgreSQL keeps and opens, as the environment has it."""

import asyncio
from urllib.parse import urlsplit

import asyncpg
import pytest

from taskyard import Yard
from taskyard.errors import UnknownTask
from taskyard.stores.postgres import connection
from taskyard.stores.postgres.connection import connect
from taskyard.testing.postgres import Databases

PATIENCE_S = 20.0

OURS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'taskyard'"


async def count(conn: asyncpg.Connection, sql: str) -> int:
    found: int = await conn.fetchval(f"SELECT count(*) {sql}")
    return found


@pytest.mark.spec("MGR-11")
@pytest.mark.parametrize(("size", "overflow"), [(2, 3), (1, 0), (None, None)], ids=["2+3", "1+0", "default"])
async def test_the_environment_bounds_the_pool(postgres_url, monkeypatch, size, overflow):
    """Many readers share as many connections as DB_POOL_SIZE and DB_MAX_OVERFLOW make together, or ten and ten; the
    former stay when they are done."""
    for name, value in {"ENVIRONMENT": None, "DB_POOL_SIZE": size, "DB_MAX_OVERFLOW": overflow}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    most, on_top = (20, 10) if size is None else (size + overflow, overflow)
    conn, theirs = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    async with Yard(postgres_url).client() as yard:
        await theirs.execute("BEGIN; LOCK TABLE taskyard.task")
        reading = [asyncio.create_task(yard.handle(f"task-{n}").record()) for n in range(most + 9)]
        async with asyncio.timeout(PATIENCE_S):
            while await count(conn, f"{OURS} AND wait_event_type = 'Lock'") < most:
                assert not any(one.done() for one in reading)
        await asyncio.sleep(0.2)  # nothing else would tell that no more come
        assert await count(conn, f"{OURS} AND wait_event_type = 'Lock'") == most
        before = await count(conn, OURS)
        await theirs.execute("COMMIT")
        answers = await asyncio.gather(*reading, return_exceptions=True)
        assert {type(answer) for answer in answers} == {UnknownTask}
        async with asyncio.timeout(PATIENCE_S):
            while await count(conn, OURS) > before - on_top:
                pass
        assert await count(conn, OURS) == before - on_top
    await conn.close()
    await theirs.close()


POOLED = {"user", "database", "client_encoding", "application_name"}
"""What PgBouncer takes with a new connection, of what we could say there; it refuses nearly everything else."""


async def test_a_pooler_is_asked_for_nothing_it_refuses(databases: Databases):
    """A connection says with its first words only what a pooler takes, and has all of our settings nevertheless."""
    server = urlsplit(databases.url)
    said: list[bytes] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            said.append(chunk)
            writer.write(chunk)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(server.hostname, server.port)
        await asyncio.gather(pass_on(reader, ours), pass_on(theirs, writer))

    pooler = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = pooler.sockets[0].getsockname()[1]
    netloc = f"{server.netloc.rpartition(':')[0]}:{port}"
    conn = await connect(f"{server._replace(netloc=netloc).geturl()}?sslmode=disable")
    words = said[0][8:].rstrip(b"\0").split(b"\0")
    assert {word.decode() for word in words[::2]} == POOLED
    shown = [await conn.fetchval(f"SHOW {name}") for name in ("default_transaction_isolation", "lock_timeout")]
    assert shown == ["read committed", f"{connection.COMMAND_S * connection.LOCK:g}s"]
    await conn.close()
    pooler.close()
    await pooler.wait_closed()
