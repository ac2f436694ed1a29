"""The servers that tests run on: one that is started for them, or one that is somewhere already."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from taskyard.testing.postgres import FAST, Server, as_user
from tests.torture.postgres.versions import OTHER, run_suite

SAMPLE = ("tests/contract/test_stores.py", "tests/stores/test_postgres.py", "tests/stores/test_postgres_migrations.py")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Server]:
    server = Server(version=OTHER, settings=FAST)
    try:
        server.start()
        yield server
    finally:
        server.stop()


async def test_nobody_gets_in_without_the_password(elsewhere):
    """Other users of the machine cannot use a server that was started for tests: its superuser runs programs as us."""
    name = urlsplit(elsewhere.url).username or ""
    for password in ("", "guess"):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(as_user(elsewhere.url, name, password))
    conn = await asyncpg.connect(elsewhere.url)
    assert conn.get_server_version().major == OTHER
    await conn.close()


def test_the_suite_runs_on_another_server(elsewhere):
    """Tests that make databases and users do so on a server of another version that asks for passwords; all of the
    suite is run so by `make torture`."""
    passed, failures = run_suite(elsewhere.url, *SAMPLE, "-k", "ostgres and (prune or missing_database or create)")
    assert (passed > 5, failures) == (True, [])
