"""Cause and traceback of an exception, read and set past its class.

A user's exception class may refuse attributes: a frozen dataclass, a `__setattr__` that raises, a `__cause__` that is a
property. Python itself does not ask the class when it raises, and neither do these functions. They never raise.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

_CAUSE: Any = vars(BaseException)["__cause__"]
_TRACEBACK: Any = vars(BaseException)["__traceback__"]


def set_cause(exc: BaseException, cause: BaseException) -> None:
    _CAUSE.__set__(exc, cause)


def find_traceback(exc: BaseException) -> TracebackType | None:
    found: TracebackType | None = _TRACEBACK.__get__(exc)
    return found


def set_traceback(exc: BaseException, tb: TracebackType | None) -> None:
    _TRACEBACK.__set__(exc, tb)
