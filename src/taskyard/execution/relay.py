"""Log records that come from workers, on their way through the host's handlers. Nothing of them is kept."""

from __future__ import annotations

import logging
from contextvars import Context
from typing import Any

from taskyard.execution.said import known_fields
from taskyard.execution.wire import WireError
from taskyard.ports.explain import clean


def relay(said: tuple[Any, ...]) -> None:
    """A log record of the worker's, through the host's handlers."""
    try:
        name, level, text, created, fields = said
        record = logging.makeLogRecord(
            {
                "name": str(name),
                "levelno": int(level),
                "levelname": logging.getLevelName(int(level)),
                "msg": clean(str(text)),
                "created": float(created),
                **known_fields(fields),
            }
        )
    except (TypeError, ValueError) as exc:
        raise WireError(f"a log record that is none: {exc}") from None
    logger = _nearest_logger(record.name)
    # Not `isEnabledFor`, which remembers every level it was asked for.
    if logging.root.manager.disable < record.levelno >= logger.getEffectiveLevel():
        # In an empty context: the present one may be that of another run, and its lines have come already.
        Context().run(logger.handle if logger.name == record.name else logger.callHandlers, record)


def _nearest_logger(name: str) -> logging.Logger:
    """The one of this name, or else the one that it would pass its records on to: the host must not grow by the names
    that code in its workers makes up."""
    known = logging.root.manager.loggerDict
    while name:
        if isinstance(logger := known.get(name), logging.Logger):
            return logger
        name = name.rpartition(".")[0]
    return logging.root
