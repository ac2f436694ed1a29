"""Exceptions that refuse attributes, and functions that raise them. Workers import this module."""

import asyncio
import sys
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class NoAttributes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{name} cannot be set")


class ExitsOnAttribute(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise SystemExit(3)


class ReadOnlyCause(Exception):
    @property
    def __cause__(self) -> None:  # type: ignore[override]
        return None


class UnreadableTraceback(Exception):
    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise LookupError("no traceback")

    def with_traceback(self, tb: object) -> NoReturn:
        raise TypeError("no traceback")

    def add_note(self, note: str) -> NoReturn:
        raise TypeError("no notes")


class Unrestorable(Exception):
    """It can be pickled, and loading that pickle ends the process."""

    def __reduce__(self) -> Any:
        return sys.exit, (5,)


RETURNING = [Frozen, NoAttributes, ExitsOnAttribute, ReadOnlyCause, UnreadableTraceback]
"""These come back as they are."""

EVERY = [*RETURNING, Unrestorable]


def fail(kind: type[Exception]) -> NoReturn:
    raise kind(7)


async def fail_async(kind: type[Exception]) -> NoReturn:
    await asyncio.sleep(0)
    raise kind(7)


def fail_by_name(kind: str) -> NoReturn:
    fail(globals()[kind])


async def fail_by_name_async(kind: str) -> NoReturn:
    await fail_async(globals()[kind])


class Nameless:
    """A callable whose name cannot be read."""

    def __call__(self) -> NoReturn:
        raise Unrestorable(7)

    def __getattr__(self, name: str) -> NoReturn:
        if name == "__qualname__":
            raise LookupError(name)
        raise AttributeError(name)
