"""What a forked child must not touch."""

from __future__ import annotations

import os

from taskyard.errors import TaskyardError


class PoolForked(TaskyardError, RuntimeError):
    """The pool was in use before fork(): its threads and its workers are the parent's. Make a new one in the child."""

    def __init__(self) -> None:
        super().__init__("this executor was in use before fork(); make a new one in the child process")


class Home:
    """The process that a pool belongs to: the one that first uses it. In a fork of that process its threads do not run,
    and its locks may be held for ever."""

    def __init__(self) -> None:
        self._pid: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that it belongs to."""
        return self._pid is not None and self._pid != os.getpid()

    def claim(self) -> None:
        """Make this process the one, or `PoolForked`. Comes before a lock of the pool is taken: a child forked at any
        moment from then on finds out here, and does not wait."""
        if self.is_elsewhere:
            raise PoolForked
        self._pid = os.getpid()
