"""What only the command line can get wrong, and which exit code an error has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Self

from taskyard.errors import InvalidInput, StoreError, StoreUrlInvalid, TaskyardError, quote, shorten

DONE, REFUSED, USAGE, NOT_REACHABLE = 0, 1, 2, 3
"""0 done, 1 refused or failed, 2 the command line makes no sense, 3 the store cannot be opened."""


SHOWN = 20
"""Names that a message lists."""


class UsageError(InvalidInput):
    """The command line cannot be understood: correct it."""

    @classmethod
    def of(cls, error: InvalidInput) -> Self:
        """The same problem, found on the command line."""
        made = cls(error.problem)
        vars(made).update(vars(error))
        return made


class AppNotFound(UsageError):
    """There is no such yard to import: correct `module:yard`, or the folder you are in."""


class NoStoreGiven(UsageError):
    """Nothing says where the store is."""

    def __init__(self) -> None:
        super().__init__(
            "which store? give --store sqlite:///work.db or postgresql://user@host/database, set TASKYARD_STORE, or "
            "name the app with --app module:yard"
        )


class NotShared(UsageError):
    """A memory store lives inside of one process: no other command can see it."""

    def __init__(self) -> None:
        super().__init__(
            "memory:// lives inside of one process, so this command would find it empty; use sqlite:///work.db"
        )


class AmbiguousTask(InvalidInput):
    """More than one task fits: give more of the id."""

    def __init__(self, fragment: str, found: Sequence[str]) -> None:
        self.fragment, self.found = fragment, list(found)
        super().__init__(f"{quote(fragment)} could be any of {', '.join(found)}; give more of it")


class AmbiguousNode(InvalidInput):
    """More than one node fits: name it by its incarnation."""

    def __init__(self, given: str, found: Sequence[str]) -> None:
        self.given, self.found = given, list(found)
        super().__init__(f"{quote(given)} could be any of {', '.join(found)}; name one by its incarnation")


class UnknownQueue(InvalidInput):
    """Nothing on this store has ever been in such a queue: correct the name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name, self.known = name, list(known)
        super().__init__(f"no queue is called {quote(name)}; {_near(name, known)}")


class UnknownSource(InvalidInput):
    """No task in this store is of such a consumer, and no app, worker or schedule has it: correct the name. `known` are
    those that are had, and those of the newest tasks."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name, self.known = name, list(known)
        super().__init__(f"no consumer is called {quote(name)}, and no task here is of one; {_near(name, known)}")


def _near(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3)
    meant = f"did you mean {' or '.join(map(quote, near))}? " if near else ""
    shown = ", ".join(map(quote, known[:SHOWN])) + (f" and {len(known) - SHOWN:,} more" * (len(known) > SHOWN))
    return f"{meant}known are {shown or 'none'}"


class NoGroup(InvalidInput):
    """The task belongs to no group: it was submitted by itself."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        super().__init__(f"task {uuid} belongs to no group")


class NotConfirmed(InvalidInput):
    """More would be changed than is without a question, and nobody said yes: nothing was changed."""

    def __init__(self, what: str, count: int, hint: str = "") -> None:
        self.what, self.count = what, count
        super().__init__("nothing was changed" + (f": {hint}" if hint else ""))


class NothingToMigrate(InvalidInput):
    """The store has no tables of its own; there is nothing to do."""

    def __init__(self, store: str) -> None:
        self.store = store
        super().__init__(f"{store} has no tables that change from version to version")


class StoreMissing(StoreError):
    """There is no such file, or nothing of ours in the database: correct the address. A command that only looks never
    makes one."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"there is no store at {path}; it is made by the first `taskyard run`, by the first submit of an app, or "
            f"in a database by `taskyard migrate`"
        )


class StoreHeld(StoreError):
    """A stopped process has the turn to write: let it go on, or end it."""

    def __init__(self, path: str, pid: int, command: str) -> None:
        self.path, self.pid = path, pid
        super().__init__(
            f"process {pid} ({command}) is stopped while it has the turn to write to {path}, and all others wait for "
            f"it; let it go on with `kill -CONT {pid}`, or end it with `kill -KILL {pid}`"
        )


_NOT_IN_DOCUMENT = frozenset({"traceback", "problem", "_problem", "_hint", "fields", "given"})


@contextmanager
def typed_on_the_command_line() -> Iterator[None]:
    """What is wrong inside stands on the command line, before anything was asked of a store."""
    try:
        yield
    except InvalidInput as wrong:
        if isinstance(wrong, UsageError):
            raise
        raise UsageError.of(wrong) from wrong


OPTION_OF = {
    "schedule_at": "--at",
    "start_at": "--from",
    "start": "--from",
    "end_at": "--to",
    "end": "--to",
    "labels": "--label",
    "requires": "--require",
    "states": "--state",
    "seconds of an interval": "--every",
}
"""The options that are not called after their parameter."""


def option_of(field: str) -> str:
    """The option of a parameter: `--timeout` for `timeout_s`. A field that is no parameter keeps its name."""
    if field in OPTION_OF:
        return OPTION_OF[field]
    return f"--{field.removesuffix('_s').replace('_', '-')}" if field.isidentifier() else field


def error_text(error: TaskyardError | TimeoutError, arguments: Sequence[str]) -> str:
    """The message, with options for parameters and the value as it was typed on the command line `arguments`."""
    if not isinstance(error, InvalidInput):
        return str(error)
    typed = None if error.field is None else _typed(option_of(error.field), arguments)
    return error.describe(option_of, None if typed is None else shorten(typed))


def _typed(option: str, arguments: Sequence[str]) -> str | None:
    """What was given for an option; the last one counts."""
    typed = None
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            typed = value if equals else following
    return typed


def exit_code_of(error: BaseException) -> int:
    match error:
        case UsageError() | StoreUrlInvalid():
            return USAGE
        case StoreError():
            return NOT_REACHABLE
        case _:
            return REFUSED


def error_document(error: TaskyardError | TimeoutError) -> dict[str, Any]:
    """An error as JSON: its code, its message, and its fields where they are plain."""
    plain = (str, int, float, list, datetime)
    fields = {
        name: value for name, value in vars(error).items() if isinstance(value, plain) and name not in _NOT_IN_DOCUMENT
    }
    return {"code": getattr(error, "code", "timeout"), "message": str(error)} | fields
