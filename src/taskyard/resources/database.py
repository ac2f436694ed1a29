"""How many connections to a database: from the cores in production, few while developing, unless the environment says
otherwise. A variable that is empty leaves it to the default; one that makes no sense does so too, with a warning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from taskyard.resources.cpu import cpu_budget
from taskyard.resources.environment import Warn, find_number, warn_as

ENVIRONMENT = "ENVIRONMENT"
POOL_SIZE = "DB_POOL_SIZE"
MAX_OVERFLOW = "DB_MAX_OVERFLOW"

PRODUCTION = frozenset({"production", "prod"})

SIZE_PER_CORE, SIZE_AT_MOST = 10, 30
OVERFLOW_PER_CORE, OVERFLOW_AT_MOST = 5, 20
DEVELOPMENT = 10, 10
"""A database that many developers share has few connections for each."""

log_warning = warn_as("database")


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


def size_database_pool() -> DatabasePool:
    """For this process, by its CPU budget and its environment as they are now."""
    return database_pool(os.environ, cores=cpu_budget().cores)


def database_pool(environ: Mapping[str, str], *, cores: int, warn: Warn = log_warning) -> DatabasePool:
    """`cores` are those this process may use. `warn` hears of each variable that is not used."""
    size, overflow = DEVELOPMENT
    size_source = overflow_source = "development"
    if environ.get(ENVIRONMENT, "").strip().lower() in PRODUCTION:
        size, size_source = min(cores * SIZE_PER_CORE, SIZE_AT_MOST), _words(SIZE_PER_CORE, SIZE_AT_MOST)
        overflow = min(cores * OVERFLOW_PER_CORE, OVERFLOW_AT_MOST)
        overflow_source = _words(OVERFLOW_PER_CORE, OVERFLOW_AT_MOST)
    asked = find_number(environ, POOL_SIZE, least=1, warn=warn)
    if asked is not None:
        size, size_source = asked, POOL_SIZE
    asked = find_number(environ, MAX_OVERFLOW, least=0, warn=warn)
    if asked is not None:
        overflow, overflow_source = asked, MAX_OVERFLOW
    return DatabasePool(size, overflow, size_source, overflow_source)


def _words(per_core: int, at_most: int) -> str:
    return f"production: cores * {per_core}, at most {at_most}"
