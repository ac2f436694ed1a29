"""What a future raises: from an answer in words back to an exception.

What the function raised is raised again as it was, with the worker's traceback as its cause. Everything else that can
become of a call has a class of its own here, each under the class that code written for `concurrent.futures` expects.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from taskyard.errors import InvalidInput, NoScript, TaskyardError, UnguardedScript
from taskyard.execution.chunk import Chunk
from taskyard.model.exception_attributes import set_cause
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.ports.explain import EXCEPTION, UNLOADED, UNRETURNED, RemoteTraceback

SENDABLE = "; use a function at the top level of a module, and arguments that can be pickled, or use a thread"

_INSTRUCTIVE = frozenset({NoScript.__name__, UnguardedScript.__name__})
"""What says itself what to do about it."""


class WorkerDied(TaskyardError, BrokenProcessPool):
    """The call's worker process died, or none could be started. This call only: the pool serves the next one, and this
    one may be submitted again if running it twice does no harm."""

    def __init__(self, function: str, why: str) -> None:
        self.function, self.why = function, why
        super().__init__(f"{function} was not finished: {why}")


class CallKilled(WorkerDied):
    """Somebody had the running call ended: `kill`, `kill_workers`, or a shutdown at its deadline."""


class CallTimedOut(TaskyardError, TimeoutError):
    """The call ran longer than the pool's `timeout_s`, and was ended with everything it had started."""

    def __init__(self, function: str, why: str) -> None:
        self.function, self.why = function, why
        super().__init__(f"{function} was ended: {why}")


class CannotCross(InvalidInput, pickle.PicklingError, ValueError):
    """The function, an argument or the result cannot go from one process to another: change it, or use a thread.
    `has_run`: it was the result; what the function did is done. `advice` says what to do, where `why` does not."""

    def __init__(self, function: str, why: str, *, has_run: bool = False, advice: str = SENDABLE) -> None:
        self.function, self.why, self.has_run = function, why, has_run
        what = "has run in a worker process, but" if has_run else "cannot run in a worker process:"
        super().__init__(f"{function} {what} {why}{advice}")


class RemoteError(TaskyardError):
    """The function raised something that cannot be pickled, or not be read back: `types` names its class and bases."""

    def __init__(self, types: tuple[str, ...], message: str) -> None:
        self.types, self.message = types, message
        super().__init__(f"{types[0] if types else 'an exception'}: {message}")


def to_exception(error: ExecutionError, function: Callable[..., Any]) -> BaseException:
    """What the caller of `function` should get. Never raises: the caller would wait for ever."""
    exc = _find_raised(error)
    if exc is None:
        exc = _translate(error, name_of(function))
    if error.traceback:
        set_cause(exc, RemoteTraceback(error.traceback))
    return exc


def _find_raised(error: ExecutionError) -> BaseException | None:
    """What the function raised, if that has come back."""
    pickled = error.details.get(EXCEPTION)
    if pickled is None or error.kind is ErrorKind.SYSTEM:
        return None
    try:
        exc = pickle.loads(pickled)
        return exc if issubclass(type(exc), BaseException) else None
    except BaseException:  # some pickle well and cannot be made again; what that raises is no business of our loop
        return None


def _translate(error: ExecutionError, name: str) -> BaseException:
    kind, message = error.kind, error.message
    if kind is ErrorKind.VALIDATION or UNLOADED in error.details:
        return CannotCross(name, message, advice="" if _INSTRUCTIVE.intersection(error.types) else SENDABLE)
    elif kind is ErrorKind.TIMEOUT:
        return CallTimedOut(name, message)
    elif kind in (ErrorKind.CANCELED, ErrorKind.REJECTED):
        return CallKilled(name, message)
    elif kind is ErrorKind.RUNTIME:
        return RemoteError(error.types, message)
    elif UNRETURNED in error.details:
        return CannotCross(name, message, has_run=True, advice="; return what can be pickled, or use a thread")
    elif EXCEPTION in error.details and "MemoryError" in error.types:
        return MemoryError(message)
    return WorkerDied(name, message)


def name_of(function: Callable[..., Any]) -> str:
    """As a message names it. Never raises, whatever the function is."""
    try:
        while isinstance(function, functools.partial | Chunk):
            function = function.func if isinstance(function, functools.partial) else function.function
        name = getattr(function, "__qualname__", None)
        return str(name) if name else type(function).__qualname__
    except Exception:
        return type(function).__qualname__
