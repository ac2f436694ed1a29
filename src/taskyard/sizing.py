"""How large pools are unless they are told: what `resources` knows of this process, for those who may not ask it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskyard.resources.database import DatabasePool
    from taskyard.resources.workers import WorkerCounts


def count_workers() -> WorkerCounts:
    """By the CPU budget and the environment, as they are now."""
    from taskyard.resources.cpu import cpu_budget
    from taskyard.resources.workers import worker_counts

    return worker_counts(os.environ, cores=cpu_budget().cores)


def cpu_workers() -> int:
    return count_workers().cpu


def size_database_pool() -> DatabasePool:
    """The same for connections to a database."""
    from taskyard.resources.cpu import cpu_budget
    from taskyard.resources.database import database_pool

    return database_pool(os.environ, cores=cpu_budget().cores)
