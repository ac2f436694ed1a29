"""How many connections to a database: from the cores in production, few while developing, unless the environment says
otherwise. A variable that is empty leaves it to the default; one that makes no sense does so too, with a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ENVIRONMENT = "ENVIRONMENT"
POOL_SIZE = "DB_POOL_SIZE"
MAX_OVERFLOW = "DB_MAX_OVERFLOW"

PRODUCTION = frozenset({"production", "prod"})

SIZE_PER_CORE, SIZE_AT_MOST = 10, 30
OVERFLOW_PER_CORE, OVERFLOW_AT_MOST = 5, 20
DEVELOPMENT = 10, 10
"""A database that many developers share has few connections for each."""

log = logging.getLogger("taskyard")


@dataclass(frozen=True, slots=True)
class DatabasePool:
    """Connections that are kept, those that may come on top while all are busy, and in words what sets each."""

    size: int
    overflow: int
    size_source: str
    overflow_source: str

    @property
    def most(self) -> int:
        """Connections there can be at one time."""
        return self.size + self.overflow


def log_warning(text: str) -> None:
    log.warning("[database] %s", text)


def database_pool(environ: Mapping[str, str], *, cores: int, warn: Callable[[str], None] = log_warning) -> DatabasePool:
    """`cores` are those this process may use. `warn` hears of each variable that is not used."""
    size, overflow = DEVELOPMENT
    size_source = overflow_source = "development"
    if environ.get(ENVIRONMENT, "").strip().lower() in PRODUCTION:
        size, size_source = min(cores * SIZE_PER_CORE, SIZE_AT_MOST), _words(SIZE_PER_CORE, SIZE_AT_MOST)
        overflow = min(cores * OVERFLOW_PER_CORE, OVERFLOW_AT_MOST)
        overflow_source = _words(OVERFLOW_PER_CORE, OVERFLOW_AT_MOST)
    asked = _find_number(environ, POOL_SIZE, least=1, warn=warn)
    if asked is not None:
        size, size_source = asked, POOL_SIZE
    asked = _find_number(environ, MAX_OVERFLOW, least=0, warn=warn)
    if asked is not None:
        overflow, overflow_source = asked, MAX_OVERFLOW
    return DatabasePool(size, overflow, size_source, overflow_source)


def _words(per_core: int, at_most: int) -> str:
    return f"production: cores * {per_core}, at most {at_most}"


def _find_number(environ: Mapping[str, str], name: str, *, least: int, warn: Callable[[str], None]) -> int | None:
    value = environ.get(name, "").strip()
    if not value:
        return None
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < least:
        warn(f"{name} is {value!r}, which is no whole number from {least} on; the default is used")
        return None
    return number
