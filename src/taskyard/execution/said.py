"""Log lines that say what they belong to: as fields of their record, which handlers can use, and in their text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

FIELDS = (
    "request_id",
    "trace_id",
    "tenant",
    "user",
    "algorithm",
    "version",
    "task",
    "consumer",
    "attempt",
    "worker_pid",
)
"""What a log record may carry from a worker process to the host's handlers, beside its text."""

SPOKEN = ("request_id", "trace_id", "tenant", "user", "task", "consumer", "attempt")
"""What of it stands in the text as well."""

_LONGEST = 200

LOG_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar("taskyard_log_fields")
"""Those of the run that this code is part of."""


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the record carries, or else the run in which it was made."""
    found = dict(LOG_FIELDS.get({}))
    found.update((name, record.__dict__[name]) for name in FIELDS if name in record.__dict__)
    return found


def known_fields(given: Any) -> dict[str, Any]:
    """Of what came from a worker, the fields that are ours; raises `TypeError` if it is nothing of the kind."""
    if not isinstance(given, dict):
        raise TypeError("fields that are none")
    return {name: given[name] for name in FIELDS if isinstance(given.get(name), str | int)}


class RunLogger(logging.LoggerAdapter[logging.Logger]):
    """Every line carries the fields it was made with."""

    def __init__(self, logger: logging.Logger, fields: Mapping[str, Any]) -> None:
        super().__init__(logger, {name: value for name, value in fields.items() if value is not None})
        spoken = [f"{name}={_printable(fields[name])}" for name in SPOKEN if fields.get(name) is not None]
        # It goes through `%` with the message.
        self._tail = " [" + " ".join(spoken).replace("%", "%%") + "]" if spoken else ""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            tail = self._tail if args else self._tail.replace("%%", "%")
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line is its caller's, not this one
            super().log(level, f"{msg}{tail}", *args, **kwargs)


def _printable(value: object) -> str:
    """On one line, whatever a caller has put into an id."""
    text = str(value)[:_LONGEST]
    return text if text.isprintable() else ascii(text)[1:-1]
