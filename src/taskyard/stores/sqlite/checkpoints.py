"""When the log is copied back into the database: in a quiet moment, or when it has become long.

SQLite itself would do it inside the COMMIT that makes the log longer than 1,000 pages, and whoever waits for that
commit waits some milliseconds more. Here the writer does it between two transactions, with its callers answered. It
holds the write turn meanwhile, so that nobody outruns it: only a log that was copied to its end begins anew.
"""

from __future__ import annotations

import logging

import apsw

log = logging.getLogger("taskyard")

WORTH_PAGES = 1000
"""How long the log is when a quiet moment is used. 4 MB."""

QUIET_S = 0.05
"""How long nothing was asked of the writer in a quiet moment."""

LONG_PAGES = 4000
"""How long the log is when it is copied, quiet or not. 16 MB: the same pages are written again and again, so that the
copy of a log four times as long takes far less than four times as long."""


class Checkpoints:
    """Belongs to the writer's thread."""

    def __init__(self, conn: apsw.Connection) -> None:
        self._conn = conn
        self._pages = 0
        self._worth_at, self._long_at = WORTH_PAGES, LONG_PAGES
        conn.set_wal_hook(self._committed)

    def _committed(self, conn: apsw.Connection, database: str, pages: int) -> int:
        """Inside each COMMIT: how long the log is now. It must not raise: the commit has happened."""
        if pages < self._pages:  # it has begun anew
            self._worth_at, self._long_at = WORTH_PAGES, LONG_PAGES
        self._pages = pages
        return apsw.SQLITE_OK

    @property
    def quiet_s(self) -> float | None:
        """How long to wait for the next job before the log is copied; None: for as long as it takes."""
        return QUIET_S if self._pages >= self._worth_at else None

    @property
    def is_long(self) -> bool:
        """Whether the log should be copied now, whoever waits."""
        return self._pages >= self._long_at

    def copy(self) -> None:
        """Copy the log to its end, with the write turn taken."""
        try:
            self._conn.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error as error:
            # Nothing is lost: the log holds it. If the disk is the reason, the next commit says so to whoever asked.
            log.debug("the log could not be copied back: %s", error)
        # Should somebody read an old state, the log cannot begin anew yet: not again before it has grown.
        self._worth_at, self._long_at = self._pages + WORTH_PAGES, self._pages + LONG_PAGES
