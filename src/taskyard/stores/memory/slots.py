"""Which task stands for which work, in memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import datetime


class Slots:
    """Slots that tasks hold by their state, and windows, which are held until a time, by tasks that `stand` for their
    work."""

    def __init__(self, stands: Callable[[str], bool]) -> None:
        self._stands = stands
        self._held: dict[str, str] = {}
        self._windows: dict[str, tuple[str, datetime]] = {}
        self._ends: list[tuple[datetime, str]] = []

    def holder(self, slot: str, now: datetime) -> str | None:
        if slot in self._held:
            return self._held[slot]
        uuid, until = self._windows.get(slot, ("", now))
        return uuid if until > now and self._stands(uuid) else None

    def window_end(self, slot: str, uuid: str) -> datetime | None:
        """Until when the task holds the slot, if it does so for a window."""
        holder, until = self._windows.get(slot, ("", None))
        return until if holder == uuid else None

    def swap(self, uuid: str, old: str | None, new: str | None) -> None:
        """The task gives up one slot and takes another, or none."""
        if old is not None:
            del self._held[old]
        if new is not None:
            self._held[new] = uuid

    def open_window(self, slot: str, uuid: str, until: datetime) -> None:
        self._windows[slot] = uuid, until
        heapq.heappush(self._ends, (until, slot))

    def close_window(self, slot: str) -> None:
        self._windows.pop(slot, None)

    def trim(self, now: datetime, limit: int) -> None:
        """Forget so many of the windows that are over, those that ended first."""
        while limit > 0 and self._ends and self._ends[0][0] <= now:
            until, slot = heapq.heappop(self._ends)
            if slot in self._windows and self._windows[slot][1] == until:
                del self._windows[slot]
                limit -= 1
