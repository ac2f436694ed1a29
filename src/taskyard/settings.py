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


def make_store(url: str | None, clock: Clock) -> Store:
    """The store at `url`: `memory://`, `sqlite:///relative/work.db`, `sqlite:////absolute/work.db`."""
    url = find_store_url(url)
    if url is None:
        raise StoreUrlInvalid("(none given; set TASKYARD_STORE or pass a URL)")
    if url == "memory://":
        from taskyard.stores.memory import MemoryStore

        return MemoryStore(clock)
    path = url.removeprefix("sqlite:///")
    if path == url or not path or path.startswith("?"):
        raise StoreUrlInvalid(url)
    from taskyard.stores.sqlite import SqliteStore

    return SqliteStore(Path(path).expanduser(), clock=clock)
