"""When a failed run is tried again, as a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from taskyard.errors import InvalidRetry, quote
from taskyard.model.execution import ErrorKind, ExecutionError

GIVE_UP_ON = (
    "ValueError",
    "TypeError",
    "FileNotFoundError",
    "NotImplementedError",
    "ImportError",
    "InvalidArguments",
    "InvalidOutput",
    "NotJson",
    "PayloadTooLarge",
    "ResultsPruned",
)
"""Trying again cannot help: bad arguments, missing or corrupt input, code that is not there, a result that cannot be
kept."""

TRY_AGAIN_ON = ("PermissionError", "BlockingIOError", "InterruptedError", "ConnectionError", "TimeoutError")
"""Transient by nature, even where a base class of theirs is given up on."""


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """`max_retries` further runs after the first, waiting `first_s`, then `factor` times as long each time, at most
    `cap_s`. `jitter` is the share of the wait that is drawn by lot (0.1: between 90 % and 100 % of it). `factor=1` is a
    fixed wait.

    `give_up_on` and `retry_on` name exception classes; of all names that match, the one nearest to the raised class
    decides, so `retry_on=("MyParseError",)` overrules the default for its base `ValueError`."""

    max_retries: int = 3
    first_s: float = 1.0
    factor: float = 2.0
    cap_s: float = 30.0
    jitter: float = 0.1
    give_up_on: tuple[str, ...] = ()
    retry_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.max_retries, bool) or not isinstance(self.max_retries, int):
            raise InvalidRetry(f"max_retries must be a whole number, not {quote(self.max_retries)}")
        for name in ("first_s", "factor", "cap_s", "jitter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRetry(f"{name} of a RetryPolicy must be a number, not {quote(value)}")
        for name in ("give_up_on", "retry_on"):
            force_setattr(self, name, _names(name, getattr(self, name)))
        # Written so that NaN, which is neither smaller nor larger than anything, is refused as well.
        waits = 0 <= self.first_s < math.inf and 0 <= self.cap_s < math.inf
        if self.max_retries < 0 or not waits or not 1 <= self.factor < math.inf or not 0 <= self.jitter <= 1:
            raise InvalidRetry(
                f"{self!r}: counts and waits must not be negative or endless, factor at least 1, jitter between 0 and 1"
            )

    @classmethod
    def on(
        cls,
        *,
        give_up_on: Iterable[type[BaseException]] = (),
        retry_on: Iterable[type[BaseException]] = (),
        max_retries: int = 3,
    ) -> RetryPolicy:
        """A policy from exception classes instead of their names."""
        return cls(
            max_retries=max_retries,
            give_up_on=tuple(t.__name__ for t in give_up_on),
            retry_on=tuple(t.__name__ for t in retry_on),
        )

    def delay(self, retries: int, jitter: float) -> float:
        """Seconds to wait after `retries` earlier retries; `jitter` is a number drawn from [0, 1)."""
        try:
            wait = min(self.cap_s, self.first_s * self.factor**retries)
        except OverflowError:  # 2.0 ** 1024 is no float any more: whatever the cap is, it was reached long before
            wait = self.cap_s if self.first_s else 0.0
        return wait * (1 - self.jitter * jitter)

    def retries_error(self, error: ExecutionError) -> bool:
        """Whether this kind of error is worth another try at all."""
        if error.kind is ErrorKind.VALIDATION:
            return False
        for name in error.types:
            if name in self.retry_on:
                return True
            if name in self.give_up_on:
                return False
            if name in TRY_AGAIN_ON:
                return True
            if name in GIVE_UP_ON:
                return False
        return True

    def exhausted(self, retries: int, error: ExecutionError) -> bool:
        return retries >= self.max_retries or not self.retries_error(error)


def _names(field: str, given: Any) -> tuple[str, ...]:
    """Names of exception classes, as they come out of a store."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRetry(f"{field} of a RetryPolicy must be a list of names, such as ['OSError'], not {quote(given)}")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            hint = f"; give its name, {name.__name__!r}, or use RetryPolicy.on" if isinstance(name, type) else ""
            raise InvalidRetry(f"{field} of a RetryPolicy must have names of classes, not {quote(name)}{hint}")
    return names


NO_RETRY = RetryPolicy(max_retries=0)
