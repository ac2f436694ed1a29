"""Forgetting ended tasks when their time is over, so that a store does not grow for ever."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from taskyard.artifact_files import sweep
from taskyard.errors import StoreError
from taskyard.ports.clock import Clock
from taskyard.ports.store import Store

log = logging.getLogger("taskyard")

KEEP_S = 7 * 86_400.0
"""A week: whoever looks on Monday still sees what failed on the weekend."""

KEEP_AUDIT_S = 365 * 86_400.0
"""A year: what people did is asked about long after its tasks are forgotten."""

EVERY_S = 60.0

BATCH = 500

PAUSE_S = 0.05
"""Between two batches, so that tasks get their turns while a large backlog is forgotten."""


class Keep(NamedTuple):
    """What is kept of the tasks that ended: those of so many seconds, and of them the latest so many. None is no
    limit."""

    age_s: float | None
    latest: int | None = None

    @property
    def is_all(self) -> bool:
        return self.age_s is None and self.latest is None


class Retention:
    """Prunes what is not to be kept: once at the start, then every minute. With `failed`, that holds for the tasks that
    failed, and `keep` for the others. The audit record is kept for `keep_audit_s` seconds (None: for ever). Then sweeps
    `artifacts`, the folder of large artifacts on this machine."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        keep: Keep,
        *,
        failed: Keep | None = None,
        artifacts: Path | None = None,
        keep_audit_s: float | None = None,
    ) -> None:
        self._store, self._clock, self._artifacts, self._keep_audit_s = store, clock, artifacts, keep_audit_s
        self._rules = [(keep, None)] if failed is None else [(keep, False), (failed, True)]
        self._is_away = False

    async def run(self) -> None:
        """Until cancelled. A store that is away, or a batch that fails, is tried again the next minute."""
        while True:
            try:
                await self.step()
                self._is_away = False
            except StoreError as error:
                if not self._is_away:
                    log.warning("ended tasks are not pruned for now: %s", error)
                self._is_away = True
            except Exception:
                log.exception("ended tasks were not pruned")
            await self._sleep(EVERY_S)

    async def step(self) -> None:
        for keep, failed in self._rules:
            if keep.age_s is not None:
                await self._prune(self._clock.now() - timedelta(seconds=keep.age_s), failed)
            # Not so many, but by the time of the last to keep: several nodes at once forget no more than one.
            if keep.latest is not None and (cut := await self._store.find_end(keep.latest, failed=failed)) is not None:
                await self._prune(cut, failed)
        if self._keep_audit_s is not None:
            before = self._clock.now() - timedelta(seconds=self._keep_audit_s)
            while await self._store.prune_audit(before, limit=BATCH) == BATCH:
                await self._sleep(PAUSE_S)
        if self._artifacts is not None:
            await sweep(self._store, self._artifacts)

    async def _prune(self, before: datetime, failed: bool | None) -> None:
        while await self._store.prune(finished_before=before, limit=BATCH, failed=failed) == BATCH:
            await self._sleep(PAUSE_S)

    async def _sleep(self, seconds: float) -> None:
        await self._clock.wait(asyncio.Event(), self._clock.monotonic() + seconds)
