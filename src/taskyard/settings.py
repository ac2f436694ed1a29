"""What the environment says: where the store is, unless a user gives its address, and what operators may tune."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from taskyard.cluster.membership import STALL_S
from taskyard.errors import InvalidInput, StoreUrlInvalid, quote
from taskyard.ports.clock import Clock
from taskyard.ports.store import Store

STORE_VARIABLE = "TASKYARD_STORE"
STALL_VARIABLE = "TASKYARD_STALL_S"

POSTGRES = ("postgresql://", "postgres://")

SEVERAL_SERVERS = (
    "several servers are named after a ?, as in "
    "postgresql://user:password@/database?host=a,b&port=5432,5432&target_session_attrs=read-write"
)

POSTGRES_FORM = "postgresql://user:password@host:5432/database"

LONGEST_NAME_BYTES = 240
"""A file system takes 255, and the names of the files beside a store are a little longer than its own."""


def find_store_url(url: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The address given, or `TASKYARD_STORE`; None if there is neither."""
    return url or environ.get(STORE_VARIABLE) or None


def find_stall_s(environ: Mapping[str, str] = os.environ) -> float:
    """For how long the event loop may stand still before its node leaves its tasks to others, where nodes share a
    server: `TASKYARD_STALL_S`, else two minutes; 0 is for ever."""
    text = environ.get(STALL_VARIABLE, "").strip()
    if not text:
        return STALL_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise InvalidInput(f"{STALL_VARIABLE} must be a number of seconds, 0 for no limit, not {quote(text)}")
    return seconds or math.inf


def check_store(store: object) -> str | Store | None:
    """The store as a user gives it: an address, the path of a SQLite file, a store, or None."""
    if isinstance(store, Path):
        store = f"sqlite:///{store}"
    if isinstance(store, str):
        check_store_url(store)
        return store
    if store is not None and not isinstance(store, Store):
        raise InvalidInput(
            f"a store is given as an address such as sqlite:///work.db, or as a pathlib.Path, not as {quote(store)}"
        )
    return store


def is_private(store: str | Store | None) -> bool:
    """Whether the store lives in this process, where no other process can run its tasks. A store without `path` and
    `url` is taken to."""
    if store is None or isinstance(store, str):
        return find_store_url(store) == "memory://"
    return not (hasattr(store, "path") or hasattr(store, "url"))


def check_store_url(url: str) -> None:
    """Raise `StoreUrlInvalid`, with what to write instead, unless `url` has the form of an address."""
    path = url.removeprefix("sqlite:///")
    if url == "memory://":
        return
    if url.startswith(POSTGRES):
        _check_postgres_url(url)
        return
    if driver := re.match(r"postgres(?:ql)?(\+\w+)://", url):
        raise StoreUrlInvalid(url, f"leave out the {driver[1]}: an address is {POSTGRES_FORM}")
    if re.search(r"\b(host|dbname|user|password)\s*=", url) and "://" not in url:
        raise StoreUrlInvalid(url, f"write it as {POSTGRES_FORM}")
    if path == url or not path:
        raise StoreUrlInvalid(url)
    if path.startswith((":memory:", "file:")):
        raise StoreUrlInvalid(url, "a store in memory is memory://, one in a file is sqlite:///path/to/work.db")
    if "?" in path:
        raise StoreUrlInvalid(url, "an address takes no options; leave out what follows the ?")
    if "\0" in path:
        raise StoreUrlInvalid(url, "a path has no NUL characters")
    if any(len(part.encode(errors="replace")) > LONGEST_NAME_BYTES for part in Path(path).parts):
        raise StoreUrlInvalid(url, f"no name in its path may be longer than {LONGEST_NAME_BYTES} bytes")


def _check_postgres_url(url: str) -> None:
    if "\0" in unquote(url):
        raise StoreUrlInvalid(url, "leave out the NUL character: the server takes it for the end")
    if re.search("[\ud800-\udfff]", url):
        raise StoreUrlInvalid(url, f"write it in UTF-8, with no other bytes: an address is {POSTGRES_FORM}")
    # Not what is wrong with it: it may be a part of the password.
    hint = f"an address is {POSTGRES_FORM}, with %40 for an @ in the password, %2F for a /, %23 for a #, %3F for a ?"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError:
        if "," in url.partition("?")[0].rpartition("@")[2]:
            hint = SEVERAL_SERVERS
        raise StoreUrlInvalid(url, hint) from None
    # The driver would take what follows the first @ for the host; a / may hide that there is another.
    rest = parts.path or f"{parts.query}#{parts.fragment}"
    if parts.netloc.count("@") > 1 or (parts.password is not None and re.search("@.*/", rest)):
        raise StoreUrlInvalid(url, hint)
    if not parts.path.strip("/") and "host=" not in parts.query and "dbname=" not in parts.query:
        raise StoreUrlInvalid(url, "name the database, as in postgresql://user@host/database")


def make_store(url: str | None, clock: Clock) -> Store:
    """The store at `url`: `memory://`, `sqlite:///relative/work.db`, `sqlite:////absolute/work.db`,
    `postgresql://user@host/database`."""
    url = find_store_url(url)
    if url is None:
        raise StoreUrlInvalid(None, f"set {STORE_VARIABLE}, or pass one, such as sqlite:///work.db")
    check_store_url(url)
    if url == "memory://":
        from taskyard.stores.memory import MemoryStore

        return MemoryStore(clock)
    if url.startswith(POSTGRES):
        return _make_postgres(url, clock)
    from taskyard.stores.sqlite import SqliteStore

    return SqliteStore(Path(url.removeprefix("sqlite:///")).expanduser(), clock=clock)


def _make_postgres(url: str, clock: Clock) -> Store:
    try:
        from taskyard.stores.postgres import PostgresStore
    except ModuleNotFoundError as exc:
        if exc.name != "asyncpg":
            raise
        raise StoreUrlInvalid(url, "for PostgreSQL install the driver: pip install 'taskyard[postgres]'") from exc
    from taskyard.resources.database import size_database_pool

    pool = size_database_pool()
    return PostgresStore(url, clock=clock, pool_size=pool.size, pool_overflow=pool.overflow)
