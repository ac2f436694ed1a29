"""Copying the log back into the database, beside the writer.

SQLite itself would do it inside the COMMIT that makes the log too long, and whoever waits for that commit waits some
milliseconds more. On a thread and a connection of its own, a copy holds up nobody. But it seldom reaches the end of a
log that grows meanwhile, and only a log that was copied to its end begins anew: when it has grown several times as
long, the writer copies it, with its callers answered and the write turn still in its hands, so that nobody writes.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import apsw

log = logging.getLogger("taskyard")

EVERY_PAGES = 1000
"""How much the log grows between two copies."""

LONG_PAGES = 4000
"""How long the log is when the writer copies. 16 MB, what a log may keep of the disk anyway."""


class Checkpoints:
    """All but `close` is called on the writer's thread."""

    def __init__(self, writer: apsw.Connection, own: apsw.Connection) -> None:
        self._writer, self._own = writer, own
        self._thread = ThreadPoolExecutor(1, "taskyard-checkpoint")
        self._copying: Future[bool] | None = None
        self._pages = self._copied_at = 0
        self._long_at = LONG_PAGES
        writer.set_wal_hook(self._committed)

    def _committed(self, conn: apsw.Connection, database: str, pages: int) -> int:
        """Inside each COMMIT of the writer: how long the log is now. It must not raise: the commit has happened."""
        if pages < self._pages:  # it has begun anew
            self._copied_at, self._long_at = 0, LONG_PAGES
        self._pages = pages
        return apsw.SQLITE_OK

    @property
    def is_long(self) -> bool:
        """Whether the writer should copy the log before it gives up its turn."""
        return self._pages >= self._long_at

    def copy_whole(self) -> None:
        """Copy the log to its end, with the write turn taken."""
        if self._copying is not None:
            self._copying.result()
        if _copy(self._writer):
            self._copied_at = self._pages
        # What keeps it from beginning anew, a reader of an old state or another process's copy, may take a while.
        self._long_at = self._pages + EVERY_PAGES

    def look(self) -> None:
        """After a transaction: start a copy beside the writer if the log has grown enough."""
        if self._pages - self._copied_at < EVERY_PAGES or (self._copying is not None and not self._copying.done()):
            return
        try:
            self._copying = self._thread.submit(_copy, self._own)
            self._copied_at = self._pages
        except RuntimeError as error:  # no thread is to be had, or the interpreter is ending
            log.debug("the log cannot be copied back: %s", error)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._own.close()


def _copy(conn: apsw.Connection) -> bool:
    """Copy what the log holds now; whether that was all of it."""
    try:
        pages, copied = conn.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    except apsw.Error as error:
        # Nothing is lost: the log holds it. If the disk is the reason, the next commit says so to whoever asked for it.
        log.debug("the log could not be copied back: %s", error)
        return False
    return copied == pages
