"""How many workers a pool has unless it is told.

What bounds this process (control groups, the environment) is not known here: whoever wires the parts together says how
to ask for it, once. Until then the CPUs that the scheduler allows must do.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def default_workers() -> int:
    """The cores this process may use, less one for the host."""
    return _count()


def set_default_workers(count: Callable[[], int]) -> None:
    """Ask `count` from now on, each time a pool is made without a number."""
    global _count
    _count = count


def _count_allowed() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4
    return max(1, usable - 1)


_count = _count_allowed
