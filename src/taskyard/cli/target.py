"""Which yard and which store a command is about, and opening them.

The store is `--store`, else `TASKYARD_STORE`, else the app's own. Only `submit` and the workers need an app; everything
else is between this process and the store.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import traceback
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from taskyard.cli.console import complain
from taskyard.cli.errors import (
    AmbiguousTask,
    AppNotFound,
    NoStoreGiven,
    NotShared,
    StoreHeld,
    StoreMissing,
    UnknownQueue,
    UnknownSource,
    UsageError,
    typed_on_the_command_line,
)
from taskyard.cli.text import cut
from taskyard.errors import UnknownTask, hide_password, quote
from taskyard.model.given import check_text
from taskyard.model.task import DEFAULT_QUEUE
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.clock import SystemClock
from taskyard.ports.schedules import ScheduleStore
from taskyard.ports.store import MigratingStore
from taskyard.settings import find_store_url, make_store
from taskyard.stores.sqlite.locks import find_sqlite_writer, find_write_lock_owner
from taskyard.yard import Yard

T = TypeVar("T")

APP_VARIABLE = "TASKYARD_APP"

PATIENCE_S = 5.0
"""How long opening a store may take before we say whom it waits for."""

SHORTEST = 4
"""Characters of an id that must be given: a slip of the finger should not find a task to cancel."""

NEWEST = 100
"""Tasks whose consumers are named to who has named one that is unknown."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the options say."""

    store: str | None = None
    app: str | None = None

    @property
    def app_name(self) -> str | None:
        return self.app or os.environ.get(APP_VARIABLE) or None

    def load(self) -> Yard:
        """The app's yard, on the store the options say."""
        if self.app_name is None:
            raise AppNotFound(f"which app? name its yard as module:yard, or set {APP_VARIABLE}")
        yard = load_yard(self.app_name)
        url = find_store_url(self.store)
        if url is not None:
            if self.store is None and isinstance(yard.where, str) and yard.where != url:
                note = f"TASKYARD_STORE ({url}) is used, not the app's own store ({yard.where})"
                complain("note", hide_password(note))
            yard.use_store(url)
        return yard

    def bare(self) -> Yard:
        """A yard without consumers, for looking and steering. Its store must be there already, and be shared."""
        url = find_store_url(self.store)
        if url is not None:
            yard = Yard(url)
        elif self.app_name is not None:
            yard = self.load()
        else:
            raise NoStoreGiven
        path = store_path(yard)
        if path is not None:
            _refuse_missing(path)
        return yard


def _refuse_missing(path: Path) -> None:
    from taskyard.stores.sqlite.place import typed_errors

    with typed_errors(path):  # it may be in a folder that this user may not enter
        is_there = path.exists()
    if not is_there:
        raise StoreMissing(str(path))


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


def store_path(yard: Yard) -> Path | None:
    """The file of a SQLite store given by its address; None for any other store."""
    url = yard.where if yard.where is not None else find_store_url(None)
    if not isinstance(url, str) or not url.startswith("sqlite:///"):
        return None
    return Path(os.path.realpath(Path(url.removeprefix("sqlite:///")).expanduser()))


def is_shared(yard: Yard) -> bool:
    """Whether its store is given by an address at which another yard finds the same."""
    url = yard.where if yard.where is not None else find_store_url(None)
    return isinstance(url, str) and url != "memory://"


def describe_store(yard: Yard) -> str:
    url = yard.where if yard.where is not None else find_store_url(None)
    return hide_password(url) if isinstance(url, str) else type(url).__name__


@asynccontextmanager
async def opened(yard: Yard, *, makes: bool = False) -> AsyncIterator[Yard]:
    """The yard without its workers, for as long as the block lasts. Unless it `makes` the store, that must be there."""
    if describe_store(yard) == "memory://":
        raise NotShared
    refuse_held(yard)
    if not makes:
        await patiently(yard, _refuse_unmade(yard))
    client = yard.client()
    await patiently(yard, client.__aenter__())
    try:
        yield yard
    finally:
        await client.__aexit__(None, None, None)


async def _refuse_unmade(yard: Yard) -> None:
    """A command that only looks makes no tables in a database that may have been named by mistake."""
    if is_shared(yard) and store_path(yard) is None:
        store = make_store(yard.where if isinstance(yard.where, str) else None, SystemClock())
        if isinstance(store, MigratingStore) and (await store.schema()).version == 0:
            raise StoreMissing(describe_store(yard))


def refuse_held(yard: Yard) -> None:
    """Opening a store takes the turn to write; a stopped process that has it would hold us up for ever."""
    path = store_path(yard)
    holder = find_write_lock_owner(path) if path is not None else None
    if path is not None and holder is not None and holder.is_stopped:
        raise StoreHeld(str(path), holder.pid, cut(holder.command, 60))


async def patiently(yard: Yard, opening: Coroutine[Any, Any, T]) -> T:
    """Await `opening`; if that takes long, say whom it waits for."""
    timer = asyncio.get_running_loop().call_later(PATIENCE_S, _say_whom, yard)
    try:
        return await opening
    finally:
        timer.cancel()


def _say_whom(yard: Yard) -> None:
    path = store_path(yard)
    why = "it has not answered, or is not done yet" if path is None else f"{_whom(path)} is writing to it"
    complain("note", f"still waiting for the store: {why}")


def _whom(path: Path) -> str:
    for find in (find_write_lock_owner, find_sqlite_writer):
        holder = find(path)
        if holder is not None and holder.pid != os.getpid():
            return f"process {holder.pid} ({cut(holder.command, 60)})"
    return "another program"


async def resolve(yard: Yard, fragment: str) -> str:
    """The one task whose id is `fragment`, or begins or ends with it."""
    with typed_on_the_command_line():
        check_text("an id", fragment)
    if await yard.store.find(fragment) is not None:
        return fragment
    wanted = fragment.strip().lower()
    if len(wanted) < SHORTEST:
        raise UsageError(f"{quote(fragment)} is too little of an id; give at least {SHORTEST} characters of its end")
    found = await yard.store.list_uuids(wanted, limit=4)
    if len(found) > 1:
        raise AmbiguousTask(wanted, found)
    if not found:
        raise UnknownTask(fragment)
    return found[0]


async def resolve_all(yard: Yard, fragments: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([await resolve(yard, fragment) for fragment in fragments]))


async def refuse_unknown_queue(yard: Yard, name: str) -> None:
    """A queue is made by being named: a slip of the finger would pause one that nobody uses, or find that nothing is in
    it."""
    known = {DEFAULT_QUEUE, *(status.name for status in await yard.queues())}
    known.update(queue for status in await yard.store.nodes() for queue in status.node.queues)
    if name not in known:
        raise UnknownQueue(name, sorted(known))


async def refuse_unknown_source(yard: Yard, target: Target, name: str) -> None:
    """The same of a consumer. It is known while somebody has it, and while there is a task of it."""
    known = {*yard.consumers, *(source for status in await yard.store.nodes() for source in status.node.consumers)}
    if isinstance(yard.store, ScheduleStore):
        known.update(status.schedule.consumer for status in await yard.store.schedules() if status.schedule is not None)
    if name in known or await yard.store.list_ids(TaskFilter(consumer=name), limit=1):
        return
    if target.app_name is not None:
        with suppress(AppNotFound):  # the command itself does not need it
            known.update(load_yard(target.app_name).consumers)
    if name not in known:
        known.update(task.consumer for task in await yard.store.list_tasks(limit=NEWEST))
        raise UnknownSource(name, sorted(known))


async def refuse_unknown(yard: Yard, target: Target, where: TaskFilter) -> None:
    """What a filter names, and nobody knows."""
    if where.queue is not None:
        await refuse_unknown_queue(yard, where.queue)
    if where.consumer is not None:
        await refuse_unknown_source(yard, target, where.consumer)


async def why_nothing(yard: Yard, target: Target, where: TaskFilter) -> str:
    """What is wrong with a filter that nothing matches; empty if nothing is."""
    try:
        await refuse_unknown(yard, target, where)
    except (UnknownQueue, UnknownSource) as unknown:
        return str(unknown)
    return ""
