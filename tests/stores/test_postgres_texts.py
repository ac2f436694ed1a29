"""Which texts a PostgreSQL database stores, and what becomes of what it does not."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from taskyard import InvalidInput, TaskFailed, Yard
from taskyard.errors import StoreNotUtf8
from taskyard.ports.clock import SystemClock
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.postgres import Databases, at_database

pytestmark = pytest.mark.anyio

EVERY = "5 € 😀 \x00 ŉ"


@pytest.fixture
def encoded(databases: Databases, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an empty database of an encoding."""
    name = "taskyard_encoded"
    databases.execute(f"CREATE DATABASE {name} ENCODING '{request.param}' LOCALE 'C' TEMPLATE template0")
    yield at_database(databases.url, name)
    databases.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("encoded", ["LATIN1", "EUC_JP"], indirect=True)
@pytest.mark.parametrize("verb", ["open", "migrate", "schema"])
async def test_a_database_that_lacks_letters_is_refused(encoded, verb):
    """A database in an encoding that cannot store every text is refused, with what to do, before anything is made."""
    with pytest.raises(StoreNotUtf8, match=r"encoding (LATIN1|EUC_JP).* ENCODING 'UTF8' TEMPLATE template0") as caught:
        await getattr(PostgresStore(encoded, clock=SystemClock()), verb)()
    assert (urlsplit(encoded).password or "no password") not in str(caught.value)
    conn = await asyncpg.connect(encoded)
    assert await conn.fetchval("SELECT to_regnamespace('taskyard')") is None
    await conn.close()


@pytest.mark.parametrize("encoded", ["UTF8", "SQL_ASCII"], indirect=True)
async def test_every_text_is_stored(encoded):
    """Arguments, results and errors of any letters are stored, in UTF8 and where the server does not look at them."""
    yard = Yard(encoded)

    @yard.consumer(retry=None)
    async def say(text: str, fails: bool = False) -> str:
        if fails:
            raise ValueError(text)
        return text

    async with yard:
        assert await (await say.submit(EVERY)).result(timeout_s=30) == EVERY
        with pytest.raises(TaskFailed, match="5 € 😀"):
            await (await say.submit(EVERY, fails=True)).result(timeout_s=30)


async def test_a_text_that_cannot_be_stored_is_bad_input(postgres_url):
    """A character that no database takes is the mistake of whoever asks, and not a store that is away."""
    async with Yard(postgres_url).client() as yard:
        with pytest.raises(InvalidInput, match="cannot be stored"):
            await yard.store.drain("a\x00b")


async def test_a_run_whose_end_cannot_be_stored_is_failed(postgres_url):
    """When the database does not take how a run ended, the task is failed with an error that says so: it is not run
    again and again, it does not stay claimed, and its slot is free."""
    conn = await asyncpg.connect(postgres_url)
    await conn.execute("ALTER TABLE taskyard.finished ADD CONSTRAINT odd CHECK (result <> '\"odd\"')")
    yard = Yard(postgres_url)
    runs = []

    @yard.consumer
    async def echo(text: str) -> str:
        runs.append(text)
        return text

    try:
        async with yard:
            odd, even = await echo.submit("odd"), await echo.submit("even")
            with pytest.raises(TaskFailed, match=r"the run ended as completed, which cannot be stored: .*odd"):
                await odd.result(timeout_s=60)
            assert await even.result(timeout_s=60) == "even"
        assert sorted(runs) == ["even", "odd"]
        assert await conn.fetchval("SELECT count(*) FROM taskyard.task") == 0
    finally:
        await conn.execute("ALTER TABLE taskyard.finished DROP CONSTRAINT odd")
        await conn.close()
