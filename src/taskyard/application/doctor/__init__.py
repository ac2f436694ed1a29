"""The doctor: examines a store and this machine, and says what to do about each problem. It changes nothing.

`stores/*/inspection.py` reads; the rules are here. A store that does not open is a finding, not an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from taskyard.application.doctor.findings import Finding, Level, ok, problem, warning
from taskyard.application.doctor.machine import check_limits, check_versions
from taskyard.application.doctor.sqlite import check_file
from taskyard.application.errors import NoStoreGiven
from taskyard.application.opening import find_app
from taskyard.errors import hide_password
from taskyard.ports.store import Store
from taskyard.settings import POSTGRES, check_store_url, find_store_url

__all__ = ["Finding", "Level", "diagnose"]


def diagnose(store: str | None = None, app: str | None = None) -> list[Finding]:
    """Examine this machine and the store at this address, else at `TASKYARD_STORE`, else that of the app `module:yard`.
    Raises `StoreUrlInvalid` and `AppNotFound`.

    It blocks for up to half a minute on a very large file: call it in a thread where an event loop is running."""
    where = _find_store(store, app)
    return [*check_versions(), *check_limits(os.environ), *_check_store(where)]


def _find_store(store: str | None, app: str | None) -> str | Store | None:
    url = find_store_url(store)
    if url is None and app is not None:
        return find_app(None, app).yard.where
    if url is not None:
        check_store_url(url)
    return url


def _check_store(where: str | Store | None) -> Iterator[Finding]:
    if where is None:
        yield ok("store", f"none examined; {NoStoreGiven().describe(lambda field: f'--{field}')}")
        return
    name = hide_password(where) if isinstance(where, str) else type(where).__name__
    yield ok("store", name, url=name)
    if isinstance(where, str) and where.startswith("sqlite:///"):
        yield from check_file(Path(os.path.realpath(Path(where.removeprefix("sqlite:///")).expanduser())))
    elif isinstance(where, str) and where.startswith(POSTGRES):
        yield from _check_postgres(where)
    elif where == "memory://":
        yield warning(
            "file",
            "none: a memory store exists only inside its own process, so there is nothing to examine",
            "use a file, such as sqlite:///work.db, if other processes should see the store",
        )
    else:
        yield ok("file", "neither a SQLite file nor a PostgreSQL database: there is nothing to examine from outside")


def _check_postgres(url: str) -> list[Finding]:
    try:
        from taskyard.application.doctor.postgres import check_server
    except ModuleNotFoundError as exc:
        if exc.name != "asyncpg":
            raise
        hint = "install it: pip install 'taskyard[postgres]'"
        return [problem("server", "the driver for PostgreSQL is missing here", hint)]
    return asyncio.run(check_server(url))
