"""Numbers from environment variables: one that makes no sense is told and not used, and nothing here raises."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from taskyard.errors import quote
from taskyard.model.given import LARGEST_COUNT

log = logging.getLogger("taskyard")

Warn = Callable[[str], None]


def warn_as(part: str) -> Warn:
    """Log warnings in the name of this part of the system."""
    return functools.partial(log.warning, "[%s] %s", part)


def find_number(environ: Mapping[str, str], name: str, *, least: int, warn: Warn) -> int | None:
    """The whole number that the variable is set to; None, and `warn` hears of it, if it is none from `least` on. None
    as well if it is not set, or to nothing."""
    value = environ.get(name, "").strip()
    if not value:
        return None
    try:
        number = int(value)
    except ValueError:
        number = -1
    if not least <= number <= LARGEST_COUNT:
        bounds = f"from {least} to {LARGEST_COUNT:,}"
        warn(f"{name} is {quote(value)}, which is no whole number {bounds}; the default is used")
        return None
    return number
