"""Finding the yard that is meant, and opening an `Application` on it.

The store is the one given, else `TASKYARD_STORE`, else the app's own. Only some calls need an app; the others are
between this process and the store.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from taskyard.application.errors import AppNotFound, NoStoreGiven, StoreMissing, StoreNotShared, WriteLockHeld
from taskyard.application.formatting import cut
from taskyard.application.local import LocalApplication
from taskyard.errors import hide_password, quote
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import MigratingStore
from taskyard.settings import find_store_url, make_store
from taskyard.stores.sqlite.locks import find_sqlite_writer, find_write_lock_owner
from taskyard.yard import Yard

COMMAND_CHARS = 60
"""Characters of another process's command line that a message shows."""


@dataclass(frozen=True, slots=True)
class FoundYard:
    """A yard that is not open yet. `note` is for the user: which of two stores is used."""

    yard: Yard
    note: str = ""


def find_yard(store: str | None, app: str | None) -> FoundYard:
    """The app's yard on the store that is meant; without an app, a yard without consumers. Its store must exist and be
    shared: this is for calls that look, or that change what is there."""
    url = find_store_url(store)
    if url is not None:
        found = FoundYard(Yard(url))
    elif app is not None:
        found = find_app(store, app)
    else:
        raise NoStoreGiven
    path = store_path(found.yard)
    if path is not None:
        _check_file_exists(path)
    return found


def find_app(store: str | None, app: str | None) -> FoundYard:
    """The app's yard, with its consumers, on the store that is meant."""
    if app is None:
        raise AppNotFound("no app given", hint="pass module:yard, or set TASKYARD_APP")
    yard, note = load_yard(app), ""
    url = find_store_url(store)
    if url is not None:
        if store is None and isinstance(yard.where, str) and yard.where != url:
            note = hide_password(f"TASKYARD_STORE ({url}) is used, not the app's own store ({yard.where})")
        yard.use_store(url)
    return FoundYard(yard, note)


def load_yard(name: str) -> Yard:
    """The yard called `module:attribute`; a module alone means its `yard`. The current folder is looked at first."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        raise AppNotFound(
            f"{quote(module_name)} is a file; name its module and the yard in it, as in {_module_of(module_name)}"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise AppNotFound(f"{quote(name)} names no module; write module:yard, with the module's name as in an import")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: object = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        raise AppNotFound(_why_not(module_name, exc)) from None
    for part in (attribute or "yard").split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise AppNotFound(f"{quote(module_name)} has no {quote(part)}; which name in it is the Yard?") from None
    if not isinstance(value, Yard):
        raise AppNotFound(f"{quote(name)} is a {type(value).__name__}, not a Yard")
    return value


def _module_of(file: str) -> str:
    parts = Path(os.path.normpath(file.removesuffix(".py"))).parts
    if all(part.isidentifier() for part in parts):
        return f"{'.'.join(parts)}:yard"
    return f"{parts[-1]}:yard, from the folder it is in"


def _why_not(module_name: str, exc: BaseException) -> str:
    if isinstance(exc, ModuleNotFoundError) and exc.name and (module_name + ".").startswith(exc.name + "."):
        return f"there is no module {quote(module_name)} in {os.getcwd()} or on the path"
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"importing {quote(module_name)} failed with {type(exc).__name__}: {exc}{place}"


# --- the store --------------------------------------------------------------------------------------------------------


def store_path(yard: Yard) -> Path | None:
    """The file of a SQLite store given by its address; None for any other store."""
    url = yard.where if yard.where is not None else find_store_url(None)
    if not isinstance(url, str) or not url.startswith("sqlite:///"):
        return None
    return Path(os.path.realpath(Path(url.removeprefix("sqlite:///")).expanduser()))


def is_shared(yard: Yard) -> bool:
    """Whether the store has an address at which another process finds the same store."""
    url = yard.where if yard.where is not None else find_store_url(None)
    return isinstance(url, str) and url != "memory://"


def describe_store(yard: Yard) -> str:
    url = yard.where if yard.where is not None else find_store_url(None)
    return hide_password(url) if isinstance(url, str) else type(url).__name__


def describe_wait(yard: Yard) -> str:
    """What an opening that takes long waits for."""
    path = store_path(yard)
    return "no answer yet" if path is None else f"{_describe_writer(path)} is writing to it"


def _describe_writer(path: Path) -> str:
    for find in (find_write_lock_owner, find_sqlite_writer):
        owner = find(path)
        if owner is not None and owner.pid != os.getpid():
            return f"process {owner.pid} ({cut(owner.command, COMMAND_CHARS)})"
    return "another program"


def _check_file_exists(path: Path) -> None:
    from taskyard.stores.sqlite.place import typed_errors

    with typed_errors(path):  # it may be in a folder that this user may not enter
        is_there = path.exists()
    if not is_there:
        raise StoreMissing(str(path))


def check_write_lock(yard: Yard) -> None:
    """Opening a store takes the write lock. If a stopped process holds it, opening would wait for ever: raise
    `WriteLockHeld` instead."""
    path = store_path(yard)
    owner = find_write_lock_owner(path) if path is not None else None
    if path is not None and owner is not None and owner.is_stopped:
        raise WriteLockHeld(str(path), owner.pid, cut(owner.command, COMMAND_CHARS))


async def _check_tables_exist(yard: Yard) -> None:
    """A call that only looks makes no tables in a database that may have been named by mistake."""
    if is_shared(yard) and store_path(yard) is None:
        store = make_store(yard.where if isinstance(yard.where, str) else None, SystemClock())
        if isinstance(store, MigratingStore) and (await store.schema()).version == 0:
            raise StoreMissing(describe_store(yard))


# --- opening ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_application(
    yard: Yard, *, actor: str, app: str | None = None, create: bool = False
) -> AsyncIterator[LocalApplication]:
    """The application on this yard. If the yard is open already, it is used as it is: a web service opens the
    application for each request. Otherwise the yard is open without its workers for as long as the block lasts, and
    its store must be shared and, unless `create` is given, exist.

    `actor` is kept with every command. `app` is the name that the yard was loaded by, for messages."""
    application = LocalApplication(yard, actor=actor, app=app)
    if yard.is_open:
        yield application
        return
    if describe_store(yard) == "memory://":
        raise StoreNotShared
    check_write_lock(yard)
    if not create:
        await _check_tables_exist(yard)
    async with yard.client():
        yield application
