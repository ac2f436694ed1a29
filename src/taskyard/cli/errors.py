"""Errors of the command line itself, exit codes, and the words for parameters: options as they were typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Self

from taskyard.application.errors import AppNotFound, AppRequired, InvalidRef, NoStoreGiven, StoreNotShared
from taskyard.errors import InvalidInput, StoreError, StoreUrlInvalid, TaskyardError, shorten

DONE, REFUSED, USAGE, NOT_REACHABLE = 0, 1, 2, 3
"""0 done, 1 refused or failed, 2 the command line makes no sense, 3 the store cannot be opened."""


class UsageError(InvalidInput):
    """The command line cannot be understood: correct it."""

    @classmethod
    def of(cls, error: InvalidInput) -> Self:
        """The same problem, found on the command line."""
        made = cls(error.problem)
        vars(made).update(vars(error))
        made.code = error.code  # of the class that found it
        return made


class NotConfirmed(InvalidInput):
    """The command needs a confirmation and did not get one. Nothing was changed."""

    def __init__(self, action: str, count: int, hint: str = "") -> None:
        self.action, self.count = action, count
        super().__init__("nothing was changed", hint=hint)


@contextmanager
def typed_on_the_command_line() -> Iterator[None]:
    """An `InvalidInput` inside is about the command line: no store has been asked yet. The exit code is then 2."""
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
    "address": "--serial",
    "settings": "--setting",
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


_NAMES_NOTHING = (AppNotFound, AppRequired, InvalidRef, NoStoreGiven, StoreNotShared, StoreUrlInvalid)


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, (UsageError, *_NAMES_NOTHING)):
        return USAGE
    return NOT_REACHABLE if isinstance(error, StoreError) else REFUSED
