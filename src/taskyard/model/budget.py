"""Spreading retries over time: what failed at once must not come back at once.

Pure: times are seconds on whatever clock the caller has, which never goes back.
"""

from __future__ import annotations

SLOT_S = 0.1
"""Retries are put off in steps of this size: who is due together costs a store one turn, and not one each."""

TIDY_EVERY = 1000
"""Bookings after which slots that have passed are forgotten."""


class RetryBudget:
    """At most `per_s` retries a second become due. Each gets the time it wants if that has room, else the next that
    has: a retry that wants to wait long is in nobody's way who wants to be back soon."""

    __slots__ = ("_booked", "_following", "_in_slot", "_untidy", "_width_s")

    def __init__(self, per_s: float) -> None:
        self._in_slot = max(1, int(per_s * SLOT_S))
        self._width_s = self._in_slot / per_s
        self._booked: dict[int, int] = {}
        # Of a slot that is full, a later one that may have room. Chains are cut short as they are followed, so that
        # the fifty thousandth retry does not look at each of the slots before its own.
        self._following: dict[int, int] = {}
        self._untidy = 0

    def book(self, at_s: float, *, now_s: float) -> float:
        """When to be back for who would be at `at_s`: then, or as soon afterwards as there is room."""
        slot = self._find_free(int(at_s // self._width_s))
        booked = self._booked.get(slot, 0) + 1
        if booked < self._in_slot:
            self._booked[slot] = booked
        else:
            self._booked.pop(slot, None)
            self._following[slot] = slot + 1
        self._untidy += 1
        if self._untidy >= TIDY_EVERY:
            self._forget_before(int(now_s // self._width_s))
        return max(at_s, slot * self._width_s)

    def _find_free(self, slot: int) -> int:
        free = slot
        while free in self._following:
            free = self._following[free]
        while slot != free:
            following, self._following[slot] = self._following[slot], free
            slot = following
        return free

    def _forget_before(self, slot: int) -> None:
        self._untidy = 0
        self._booked = {at: n for at, n in self._booked.items() if at >= slot}
        self._following = {at: later for at, later in self._following.items() if at >= slot}
