"""Where the store is: the address a user gives, or the environment does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from taskyard.errors import StoreUrlInvalid
from taskyard.ports.clock import Clock
from taskyard.ports.store import Store

STORE_VARIABLE = "TASKYARD_STORE"


def find_store_url(url: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The address given, or `TASKYARD_STORE`; None if there is neither."""
    return url or environ.get(STORE_VARIABLE) or None


def check_store_url(url: str) -> None:
    """Raise `StoreUrlInvalid`, with what to write instead, unless `url` has the form of an address."""
    path = url.removeprefix("sqlite:///")
    if url == "memory://":
        return
    if path == url or not path:
        raise StoreUrlInvalid(url)
    if path.startswith((":memory:", "file:")):
        raise StoreUrlInvalid(url, "a store in memory is memory://, one in a file is sqlite:///path/to/work.db")
    if "?" in path:
        raise StoreUrlInvalid(url, "an address takes no options; leave out what follows the ?")


def make_store(url: str | None, clock: Clock) -> Store:
    """The store at `url`: `memory://`, `sqlite:///relative/work.db`, `sqlite:////absolute/work.db`."""
    url = find_store_url(url)
    if url is None:
        raise StoreUrlInvalid(None, f"set {STORE_VARIABLE}, or pass one, such as sqlite:///work.db")
    check_store_url(url)
    if url == "memory://":
        from taskyard.stores.memory import MemoryStore

        return MemoryStore(clock)
    from taskyard.stores.sqlite import SqliteStore

    return SqliteStore(Path(url.removeprefix("sqlite:///")).expanduser(), clock=clock)
