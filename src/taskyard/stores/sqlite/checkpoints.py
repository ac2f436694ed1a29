"""Copying the log back into the database, beside the writer.

SQLite itself would do it inside the COMMIT that makes the log too long, and whoever waits for that commit waits some
milliseconds more. On a thread and a connection of its own, a copy holds up nobody. But it seldom reaches the end of a
log that grows meanwhile, and only a log that was copied to its end begins anew: when it has grown several times as
long, the writer finishes the copy, between two transactions.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import apsw

log = logging.getLogger("taskyard")

EVERY_PAGES = 1000
"""How much the log grows between two copies."""

WRITER_PAGES = 4000
"""How long the log is when the writer copies. 16 MB, what a log may keep of the disk anyway."""


class Checkpoints:
    """All but `close` is called on the writer's thread."""

    def __init__(self, writer: apsw.Connection, own: apsw.Connection) -> None:
        self._writer, self._own = writer, own
        self._thread = ThreadPoolExecutor(1, "taskyard-checkpoint")
        self._copying: Future[None] | None = None
        self._pages = self._copied_at = 0
        self._catch_up_at = WRITER_PAGES
        writer.set_wal_hook(self._watch)

    def _watch(self, conn: apsw.Connection, database: str, pages: int) -> int:
        """After each commit of the writer: how long the log is now."""
        if pages < self._pages:  # it has begun anew
            self._copied_at, self._catch_up_at = 0, WRITER_PAGES
        self._pages = pages
        if pages - self._copied_at >= EVERY_PAGES and (self._copying is None or self._copying.done()):
            self._copied_at = pages
            self._copying = self._thread.submit(_copy, self._own)
        return apsw.SQLITE_OK

    def catch_up(self) -> None:
        """Between two transactions of the writer: what the copies beside it have left is copied now."""
        if self._pages < self._catch_up_at or (self._copying is not None and not self._copying.done()):
            return
        _copy(self._writer)
        # Should somebody read an old state, the log cannot begin anew yet: not again at once.
        self._copied_at, self._catch_up_at = self._pages, self._pages + EVERY_PAGES

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._own.close()


def _copy(conn: apsw.Connection) -> None:
    try:
        conn.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    except apsw.Error as error:
        # Nothing is lost: the log holds it. If the disk is the reason, the next commit says so to whoever asked for it.
        log.debug("the log could not be copied back: %s", error)
