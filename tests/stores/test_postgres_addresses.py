"""Addresses of PostgreSQL that are nearly right: each is told what to correct, not to look after the server."""

from urllib.parse import urlsplit

import pytest

from taskyard import StoreError
from taskyard.errors import StoreDenied, StoreUnreachable, StoreUrlInvalid
from taskyard.ports.clock import SystemClock
from taskyard.settings import make_store
from taskyard.stores.postgres import PostgresStore

NO_SUCH_SERVER = r"\(no server there is what target_session_attrs asks for\); correct that option, or name all"

OPTIONS = [
    pytest.param("sslmode=bogus", StoreUrlInvalid, "correct its options: `sslmode` parameter must be", id="value"),
    pytest.param("sslmode=verify-full&sslrootcert=/nothing/here", StoreError, "correct", id="certificate"),
    pytest.param("sslmode=require", StoreUnreachable, "correct sslmode and the certificates", id="no-tls"),
    pytest.param("colour=red", StoreDenied, 'parameter "colour"; correct the options after the', id="unknown"),
    pytest.param("work_mem=lots", StoreDenied, "correct the options after the", id="server-value"),
    pytest.param("max_connections=9", StoreDenied, "correct the options after the", id="not-changed-so"),
    pytest.param("target_session_attrs=standby", StoreUnreachable, NO_SUCH_SERVER, id="no-such-server"),
]


@pytest.mark.parametrize(("option", "error", "advice"), OPTIONS)
async def test_an_option_that_cannot_be(postgres_url, option, error, advice):
    """An option that the driver or the server refuses is named, and it is said that the address is to be corrected."""
    with pytest.raises(error, match=advice) as raised:
        await PostgresStore(f"{postgres_url}?{option}", clock=SystemClock()).open()
    assert "check that the server runs" not in str(raised.value)


async def test_a_host_that_is_not_known():
    """Where the host is not known, that is what is to be corrected."""
    with pytest.raises(StoreUnreachable, match=r"correct the host in the address$"):
        await PostgresStore("postgresql://me:secret@nowhere.invalid/db", clock=SystemClock()).open()


async def test_a_password_that_was_taken_for_the_rest():
    """Where a character of the password has cut the address short, it is said how to write such characters."""
    with pytest.raises(StoreUnreachable, match="if it is a part of the password, write %2F") as raised:
        await PostgresStore("postgresql://me.invalid:12/secret@host/db", clock=SystemClock()).open()
    assert "secret" not in str(raised.value)


async def test_several_servers(postgres_url):
    """Of several servers in one address the first that answers and may be written to is used; written any other way,
    it is said how."""
    parts = urlsplit(postgres_url)
    hosts = f"host=127.0.0.1,{parts.hostname}&port=1,{parts.port}&target_session_attrs=read-write"
    store = make_store(f"postgresql://{parts.username}:{parts.password}@{parts.path}?{hosts}", SystemClock())
    await store.open()
    assert await store.nodes() == []
    await store.close()
    with pytest.raises(StoreUrlInvalid, match=r"\?host=a,b&port=5432,5432&target_session_attrs=read-write"):
        make_store("postgresql://me:secret@one:5432,two:5432/db", SystemClock())
