"""What a caller hands to a pool, checked where it is handed over: a wrong value must not be found out in a worker, or
by a process that others need as well. Raises `TypeError` and `ValueError`, as `concurrent.futures` does."""

from __future__ import annotations

import inspect
from typing import Any

from taskyard.errors import quote
from taskyard.model.given import LARGEST_COUNT, LEAST_MEMORY, LONGEST_S

_NUMBER = int | float


def check_whole(name: str, value: Any, *, least: int = 1, most: int | None = LARGEST_COUNT) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {quote(value)}")
    if value < least:
        bound = "greater than 0" if least == 1 else f"at least {least:,}"
        raise ValueError(f"{name} must be {bound}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:,}, not {value}")


def check_memory(name: str, value: Any) -> None:
    """A limit in bytes. What is less than an idle worker has would fail calls for no doing of theirs."""
    check_whole(name, value, most=None)
    if value < LEAST_MEMORY:
        raise ValueError(f"{name} is in bytes, and must be at least {LEAST_MEMORY:,} (32 MiB), not {value}")


def check_seconds(name: str, value: Any, *, may_be_zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise TypeError(f"{name} must be a number of seconds, not {quote(value)}")
    if not (value > 0 or (may_be_zero and value == 0)):
        raise ValueError(f"{name} must be {'0 or more' if may_be_zero else 'greater than 0'}, not {value}")
    if value > LONGEST_S:
        raise ValueError(f"{name} must be at most 1e9 seconds, not {value}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {quote(value)}")


def check_modules(name: str, value: Any) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(module, str) for module in value):
        raise TypeError(f'{name} must be a tuple of names of modules, such as ("numpy",), not {quote(value)}')


def check_environ(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise TypeError(f"{name} must be a dict of strings, not {quote(value)}")


def check_function(function: Any) -> None:
    """One that a worker can call: a number would be taken for one that it knows already."""
    if not callable(function):
        raise TypeError(f"a pool calls functions, not {quote(function)}")


def check_plain_function(function: Any) -> None:
    """One that a thread can call and have the answer. An async one has its place on the caller's event loop."""
    check_function(function)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise TypeError(
            f"{quote(function)} is async, and a thread would only make a coroutine of it, which nobody runs; await it "
            f"where the event loop is, or use a plain function"
        )
