"""From what user code raised to an `ExecutionError`: text only, bounded, and never raising itself."""

from __future__ import annotations

import io
import pickle
import time
import traceback
from typing import Any

import msgspec

from taskyard.errors import Cancel, DeviceLost, RetryLater, StoredArgumentsInvalid, TaskyardError
from taskyard.model.exception_attributes import find_traceback
from taskyard.model.execution import INTERNAL_FAULT, ErrorCode, ErrorKind, ExecutionError, ExecutionResult

MESSAGE_CHARS = 4_000
TRACEBACK_CHARS = 20_000
"""The end of a traceback says where it happened: that is what is kept of a long one."""

EXCEPTION = "exception"
"""In an error's details: the exception, pickled."""

UNLOADED, UNRETURNED = "unloaded", "unreturned"
"""In an error's details: true if the call could not be read by its worker, and so never ran; if its result could not be
sent back, or not be read here."""

_TOO_GENERAL = frozenset({object, BaseException, Exception})


class RemoteTraceback(Exception):
    """The cause of what a worker raised: the traceback as it was there."""

    def __init__(self, tb: str) -> None:
        self.tb = tb
        super().__init__(tb)

    def __str__(self) -> str:
        return f'\n"""\n{self.tb}"""'


def explain(exc: BaseException) -> ExecutionError:
    """What `exc` means for the run."""
    if isinstance(exc, Cancel):
        return ExecutionError(kind=ErrorKind.CANCELED, message=_message(exc), types=("Cancel",))
    if isinstance(exc, RetryLater):
        details = {"delay_s": exc.delay_s}
        return ExecutionError(kind=ErrorKind.RUNTIME, message=_message(exc), types=("RetryLater",), details=details)
    kind = ErrorKind.VALIDATION if isinstance(exc, StoredArgumentsInvalid) else ErrorKind.RUNTIME
    return ExecutionError(kind=kind, message=_message(exc), types=type_names(type(exc)), traceback=_traceback(exc))


def with_exception(error: ExecutionError, exc: BaseException) -> ExecutionError:
    """The same with `exc` itself, pickled, in its details; as it is, where that cannot be."""
    try:
        pickled = io.BytesIO()
        _ExceptionPickler(pickled, 5).dump(exc)
        return msgspec.structs.replace(error, details={**error.details, EXCEPTION: pickled.getvalue()})
    except BaseException:  # its code is anybody's
        return error


class _ExceptionPickler(pickle.Pickler):
    """Restores the attributes of an exception past its `__setattr__`. `BaseException.__setstate__` would use that one,
    and the one of a frozen dataclass raises."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if (
            issubclass(kind, BaseException)
            and kind.__setattr__ is not BaseException.__setattr__
            and kind.__reduce_ex__ is BaseException.__reduce_ex__
            and kind.__reduce__ is BaseException.__reduce__
        ):
            return restore_exception, (kind, obj.args, vars(obj))
        return NotImplemented


def restore_exception(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    exc = kind(*args)
    vars(exc).update(attributes)
    return exc


def timed_out(timeout_s: float) -> ExecutionError:
    return ExecutionError(
        kind=ErrorKind.TIMEOUT, message=f"it ran longer than its timeout of {timeout_s:g} s", types=("TimeoutError",)
    )


def canceled(message: str = "canceled while it was running") -> ExecutionError:
    return ExecutionError(kind=ErrorKind.CANCELED, message=message)


def fault(message: str) -> ExecutionError:
    """Something broke that is no doing of the request's."""
    return ExecutionError(kind=ErrorKind.SYSTEM, message=message)


def internal_fault(exc: BaseException) -> ExecutionError:
    """Taskyard or an executor raised `exc` where it must answer. No worker died of it."""
    error = explain(exc)
    return msgspec.structs.replace(error, kind=ErrorKind.SYSTEM, details={**error.details, INTERNAL_FAULT: True})


def refused(message: str) -> ExecutionError:
    """The request does not fit the executor: trying again cannot help."""
    return ExecutionError(kind=ErrorKind.VALIDATION, message=message)


def device_lost(device: str) -> ExecutionError:
    """The device of the run is gone or does not answer. The task is taken back."""
    return ExecutionError(
        kind=ErrorKind.SYSTEM, code=ErrorCode.DEVICE_LOST, types=(DeviceLost.__name__,), details={"device": device}
    )


def rejected(message: str, *types: str, retry_after_s: float | None = None) -> ExecutionError:
    """There is no room for the request now, and nothing of it was run. `types` says what there is too much of."""
    details = {} if retry_after_s is None else {"retry_after_s": round(retry_after_s, 3)}
    return ExecutionError(kind=ErrorKind.REJECTED, message=message, types=types, details=details)


def waited_long(wait_s: float) -> ExecutionError:
    # What is left of a limit after the way here differs a little from what the caller wrote.
    message = f"no worker was free for it within {round(wait_s, 2 if wait_s >= 0.1 else 4):g} s"
    return ExecutionError(kind=ErrorKind.TIMEOUT, message=message, types=("TimeoutError",))


def failed(error: ExecutionError) -> ExecutionResult:
    """The answer to a request of which nothing was run."""
    now = time.time()
    return ExecutionResult(success=False, error=error, started_at=now, ended_at=now)


def type_names(cls: type[BaseException]) -> tuple[str, ...]:
    """The class and its bases by name, nearest first, without those that every exception has."""
    return tuple(base.__name__ for base in cls.__mro__ if base not in _TOO_GENERAL) or (cls.__name__,)


def in_words(exc: BaseException) -> str:
    """Its message after the name of its class, to end a sentence with: `KeyError: 'k'`. Ours say all in theirs."""
    message = _message(exc)
    name = type(exc).__name__
    return message if isinstance(exc, TaskyardError) or message == name else f"{name}: {message}"


def _message(exc: BaseException) -> str:
    try:
        text = str(exc)
    except BaseException as broken:
        text = f"{type(exc).__name__}, whose text could not be read: {type(broken).__name__}"
    return clean(text or type(exc).__name__)[:MESSAGE_CHARS]


def _traceback(exc: BaseException) -> str:
    tb = find_traceback(exc)
    try:
        # The first frame is the executor's own.
        tb = None if tb is None else tb.tb_next
        text = "".join(traceback.format_exception(type(exc), exc, tb))
    except BaseException as broken:
        text = f"{type(exc).__name__}, whose traceback could not be written: {type(broken).__name__}\n"
    return clean(text)[-TRACEBACK_CHARS:]


def clean(text: str) -> str:
    """Without lone surrogates, which no database takes."""
    return text.encode("utf-8", "backslashreplace").decode()
