"""Errors of the application layer, and how any error of Taskyard becomes a document."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from taskyard.application.documents import ErrorDocument
from taskyard.errors import (
    InvalidArguments,
    InvalidInput,
    StoreError,
    TaskyardError,
    UnknownConsumer,
    UnknownDevice,
    quote,
)

MAX_NAMES = 20
"""Names that a message lists: as many as a person reads."""

_NOT_DATA = frozenset({"self", "problem", "hint", "field", "fields", "given", "traceback"})


def describe_error(error: TaskyardError | TimeoutError) -> ErrorDocument:
    """The error as a document. Its data are the values that its class is made of, as far as they are plain."""
    message = str(error) or type(error).__name__
    if not isinstance(error, TaskyardError):
        return ErrorDocument(code="timeout", message=message)
    data = {
        name: value for name in _fields_of(type(error)) if (value := _plain(getattr(error, name, None))) is not None
    }
    field = None
    if isinstance(error, InvalidInput):
        field = error.field
        if isinstance(error, InvalidArguments) and len(error.names) == 1:
            (field,) = error.names
        if error.item is not None:
            data["item"] = error.item
    return ErrorDocument(code=error.code, message=message, field=field, hint=error.hint, data=data)


def _fields_of(cls: type[TaskyardError]) -> tuple[str, ...]:
    parameters = inspect.signature(cls).parameters.values()
    names = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return tuple(name for name in names if name not in _NOT_DATA)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple):
        value = sorted(value)
    return value if isinstance(value, str | int | float | list | datetime) else None


# --- which store, which app -------------------------------------------------------------------------------------------


class AppNotFound(InvalidInput):
    """There is no such yard to import: correct `module:yard`, or start in another folder."""


class AppRequired(InvalidInput):
    """The call needs the consumer's code: open the application with its app."""


class NoStoreGiven(InvalidInput):
    """Nothing says where the store is."""

    def __init__(self) -> None:
        super().__init__(
            "no store given",
            fields=("store", "app"),
            hint="pass {store} sqlite:///work.db or postgresql://user@host/database, set TASKYARD_STORE, or name the "
            "app with {app} module:yard",
        )


class StoreNotShared(InvalidInput):
    """A memory store lives inside one process: no other program can see it."""

    def __init__(self) -> None:
        super().__init__(
            "a memory:// store exists only inside its own process", hint="use a file, for example sqlite:///work.db"
        )


class StoreMissing(StoreError):
    """There is no such file, or nothing of Taskyard in the database: correct the address. Only a call that writes new
    tasks makes a store."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"there is no store at {path}",
            hint="check the address. `taskyard run` makes the store, and so does the first submit of an app; in a "
            "database `taskyard migrate` does too",
        )


class WriteLockHeld(StoreError):
    """A stopped process holds the write lock: let it go on, or end it."""

    def __init__(self, path: str, pid: int, command: str) -> None:
        self.path, self.pid, self.command = path, pid, command
        super().__init__(
            f"process {pid} ({command}) is stopped and holds the write lock of {path}, so every writer waits",
            hint=f"let it go on with `kill -CONT {pid}`, or end it with `kill -KILL {pid}`",
        )


class NothingToMigrate(InvalidInput):
    """The store has no tables of its own; there is nothing to do."""

    def __init__(self, store: str) -> None:
        self.store = store
        super().__init__(f"{store} has no tables that change from version to version")


# --- names and refs ---------------------------------------------------------------------------------------------------


class InvalidRef(InvalidInput):
    """This cannot name a task: give a whole id, or at least 4 characters of its beginning or end."""


class AmbiguousTask(InvalidInput):
    """More than one task fits: give more of the id."""

    def __init__(self, ref: str, found: Sequence[str]) -> None:
        self.ref, self.found = ref, list(found)
        super().__init__(f"{quote(ref)} matches several tasks: {', '.join(found)}", hint="give more of the id")


class AmbiguousNode(InvalidInput):
    """More than one node fits: name it by its incarnation."""

    def __init__(self, ref: str, found: Sequence[str]) -> None:
        self.ref, self.found = ref, list(found)
        super().__init__(f"{quote(ref)} matches several nodes: {', '.join(found)}", hint="name one by its incarnation")


class UnknownQueue(InvalidInput):
    """No task of this store has ever been in such a queue: correct the name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name, self.known = name, list(known)
        super().__init__(f"there is no queue {quote(name)}", hint=_suggest(name, "queues", known))


class NoSuchConsumer(UnknownConsumer):
    """No task in this store is of such a consumer, and no app, node or schedule has it: correct the name. `known` are
    the consumers of those, and of the newest tasks."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, known)
        problem = f"there is no consumer {quote(name)}, and no stored task has it"
        InvalidInput.__init__(self, problem, hint=_suggest(name, "consumers", known))


def unknown_device(device: str, known: Sequence[str]) -> UnknownDevice:
    """The error with the names that are close."""
    return UnknownDevice(device, hint=_suggest(device, "devices", known))


class UnknownPool(InvalidInput):
    """No device of this store is in such a pool, and no queue has this name: correct it."""

    def __init__(self, pool: str, known: Sequence[str]) -> None:
        self.pool, self.known = pool, list(known)
        super().__init__(f"there is no device pool {quote(pool)}", hint=_suggest(pool, "pools", known))


class NotQuarantined(InvalidInput):
    """Tasks of this account are not refused: see which accounts are quarantined."""

    def __init__(self, account: int | str, consumer: str | None, known: Sequence[int | str]) -> None:
        self.account, self.consumer = account, consumer
        of = "" if consumer is None else f" for {quote(consumer)}"
        names = ", ".join(str(one) for one in dict.fromkeys(known[:MAX_NAMES]))
        super().__init__(f"account {account!r} is not quarantined{of}", hint=f"quarantined accounts: {names or 'none'}")


def _suggest(name: str, what: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3)
    meant = f"did you mean {' or '.join(map(quote, near))}? " if near else ""
    label = f"Known {what}: " if near else f"known {what}: "
    shown = ", ".join(map(quote, known[:MAX_NAMES]))
    more = f" and {len(known) - MAX_NAMES:,} more" if len(known) > MAX_NAMES else ""
    return f"{meant}{label}{shown or 'none'}{more}"


class NoGroup(InvalidInput):
    """The task belongs to no group: it was submitted by itself."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        super().__init__(f"task {uuid} belongs to no group")


# --- waiting ----------------------------------------------------------------------------------------------------------


class WaitTimeout(TaskyardError, TimeoutError):
    """The task has not finished in time. It goes on: wait again, or look later."""

    code = "timeout"

    def __init__(self, uuid: str, message: str) -> None:
        self.uuid = uuid
        super().__init__(message)
