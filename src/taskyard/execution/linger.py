"""Staying awake for the next call.

To put a process to sleep and wake it again costs more than a short call does, most of all on a virtual machine. So a
worker whose host calls it again and again looks for the next call a little longer before it sleeps.
"""

from __future__ import annotations

from collections.abc import Callable

LOOKS = 150
"""How often it looks before it sleeps: for about as long as a sleep and a wake-up take."""

MOST_SKIPPED = 256


class Linger:
    """`has_news` says whether something can be read.

    Looks in vain waste a CPU that the host may be waiting for. So after each time that it looked for nothing it goes to
    sleep at once twice as many times as before: calls now and then cost no more than they would without it."""

    def __init__(self, has_news: Callable[[], object]) -> None:
        self._has_news = has_news
        self._to_skip = self._skipped = 0

    def look(self) -> None:
        """Return when there is something to read, or after a while."""
        if self._to_skip:
            self._to_skip -= 1
            return
        has_news = self._has_news
        for _ in range(LOOKS):
            if has_news():
                self._skipped = 0
                return
        self._skipped = self._to_skip = min(2 * self._skipped or 1, MOST_SKIPPED)
