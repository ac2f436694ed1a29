"""How a pool of worker processes behaves: what it is told, checked once, when it is told."""

from __future__ import annotations

import msgspec

from taskyard.errors import quote
from taskyard.execution.checks import (
    check_environ,
    check_flag,
    check_memory,
    check_modules,
    check_seconds,
    check_whole,
)
from taskyard.execution.sizing import default_workers


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool behaves. `max_workers`: by default the usable cores less one.

    `queue_limit`: calls that may wait; more are rejected. `wait_s`: how long one may wait for a worker. `load_s`: how
    long a worker may take to start, and to import what a call names. `cancel_grace_s`: from being asked to end to
    SIGTERM; `term_grace_s`: from there to SIGKILL. `recycle_after` calls, or above `recycle_rss` bytes in memory, a
    worker is replaced; `memory_limit` bytes of data are all it can allocate. `pipeline`: calls sent ahead to one
    worker; more than 1 suits short calls only. `preload`: modules that a worker has before it is ready, imported once,
    in the nursery. `setup`: a pickled pair of function and arguments, called in each worker before it is ready.
    `environ`: variables that its workers have on top of the host's; they import what is preloaded themselves, to see
    them."""

    max_workers: int = msgspec.field(default_factory=default_workers)
    queue_limit: int = 1000
    wait_s: float | None = None
    load_s: float = 60.0
    cancel_grace_s: float = 5.0
    term_grace_s: float = 1.0
    recycle_after: int | None = None
    recycle_rss: int | None = None
    memory_limit: int | None = None
    pipeline: int = 1
    spare: bool = True
    preload: tuple[str, ...] = ()
    setup: bytes | None = None
    environ: dict[str, str] = {}

    def __post_init__(self) -> None:
        self._check_counts()
        check_seconds("load_s", self.load_s)
        if self.wait_s is not None:
            check_seconds("wait_s", self.wait_s, may_be_zero=True)
        for name in ("cancel_grace_s", "term_grace_s"):
            check_seconds(name, getattr(self, name), may_be_zero=True)
        check_flag("spare", self.spare)
        check_modules("preload", self.preload)
        msgspec.structs.force_setattr(self, "preload", tuple(self.preload))
        check_environ("environ", self.environ)
        if not isinstance(self.setup, bytes | None):
            raise TypeError(f"setup must be a pickled pair of function and arguments, not {quote(self.setup)}")

    def _check_counts(self) -> None:
        check_whole("max_workers", self.max_workers)
        check_whole("queue_limit", self.queue_limit, least=0, most=None)
        check_whole("pipeline", self.pipeline)
        if self.recycle_after is not None:
            check_whole("recycle_after", self.recycle_after, most=None)
        for name in ("recycle_rss", "memory_limit"):
            if getattr(self, name) is not None:
                check_memory(name, getattr(self, name))
