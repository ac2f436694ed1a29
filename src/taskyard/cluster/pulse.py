"""When to beat, when to keep still, and when a lease can no longer be trusted: decided here, by the time that is passed
in. Nothing waits and nothing is written."""

from __future__ import annotations

import math
from enum import Enum, auto

import msgspec

from taskyard.ports.store import BEATS_PER_LEASE

TRUSTED = 0.8
"""Of the lease, counted from when the last beat that was heard was sent. The others count the whole lease, and from
when they saw that beat, which was later: what is left of it is the time in which this node stops what it runs."""

LAST_TRY = 0.1
"""Of the lease: what a beat may take that is made when that time is over already, because the process was stopped or
the GIL was held. Whether the others have given the node up, only the store knows."""

LONGEST_TRY = 0.4
"""Of the lease: a connection that is dead without saying so must leave time for a second try on another."""

RETRY_S = (0.5, 2.0)
"""Between tries of a beat that was not heard, and so between connections: at least, at most. The store's other users
connect about as often again, and all together shall not connect more than twice a second."""


class Act(Enum):
    WAIT = auto()
    BEAT = auto()
    STALLED = auto()
    LOST = auto()


class Step(msgspec.Struct, frozen=True):
    """What to do now; for a wait, and for a beat, until when."""

    act: Act
    until_mono: float


class Pulse:
    """`began_mono` is just before the node joined: joining is its first beat."""

    def __init__(self, lease_s: float, *, stall_s: float, began_mono: float) -> None:
        self._lease_s, self._stall_s = lease_s, stall_s
        self._every_s = lease_s / BEATS_PER_LEASE
        least_s, most_s = RETRY_S
        self._retry_s = max(least_s, min(most_s, self._every_s))
        self._due_mono = self._looked_mono = self._ticked_mono = began_mono
        self._still_s = 0.0
        self._trusted_until_mono = began_mono + TRUSTED * lease_s

    def next(self, now_mono: float, ticked_mono: float) -> Step:
        """`ticked_mono` is when the event loop that runs the tasks last gave a sign of life; infinity, if there is none
        to watch."""
        if self._still(now_mono, ticked_mono) >= self._stall_s:
            return Step(Act.STALLED, now_mono + self._every_s)
        # A beat that is due goes before the verdict: after a time in which nothing could run, it may still be heard.
        if now_mono >= self._due_mono:
            trusted_s = self._trusted_until_mono - now_mono
            left_s = trusted_s if trusted_s > 0 else LAST_TRY * self._lease_s
            return Step(Act.BEAT, now_mono + min(left_s, LONGEST_TRY * self._lease_s))
        if now_mono >= self._trusted_until_mono:
            return Step(Act.LOST, now_mono)
        return Step(Act.WAIT, min(self._due_mono, self._trusted_until_mono))

    def _still(self, now_mono: float, ticked_mono: float) -> float:
        """How long the loop has stood still while we did not: in a process that was stopped, nothing hangs."""
        gap_s, self._looked_mono = now_mono - self._looked_mono, now_mono
        if ticked_mono != self._ticked_mono or ticked_mono == math.inf:
            self._ticked_mono, self._still_s = ticked_mono, 0.0
        else:
            self._still_s += min(gap_s, self._lease_s)
        return self._still_s

    def heard(self, sent_mono: float) -> None:
        self._due_mono = sent_mono + self._every_s
        self._trusted_until_mono = sent_mono + TRUSTED * self._lease_s

    def missed(self, now_mono: float) -> None:
        self._due_mono = now_mono + self._retry_s
