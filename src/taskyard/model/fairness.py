"""Whose turn it is between the priorities of one queue: high first, but nobody waits for ever.

One step at a time: of each priority that has a task to start, its first one is looked at, one is chosen, and what the
queue remembers is brought up to date. However many claims a store makes at once, they are as many such steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

NEVER: tuple[datetime | None, ...] = (None, None, None)
NOT_PASSED = (0, 0, 0)


class FairnessState(msgspec.Struct, frozen=True, gc=False):
    """What a queue remembers, for every node: of each priority, how many higher ones have started since it last had its
    turn while it had a task to start, and when it was last let in before a higher one; and the bucket served last."""

    passed_over: tuple[int, ...] = NOT_PASSED
    last_favored_at: tuple[datetime | None, ...] = NEVER
    bucket: str | None = None


NO_FAIRNESS_STATE = FairnessState()


class Patience(msgspec.Struct, frozen=True):
    """How long a lower priority lets higher ones go first: `after` so many starts, or once its first task has waited
    for `wait`. None: for ever."""

    after: int | None
    wait: timedelta | None

    @property
    def is_endless(self) -> bool:
        return self.after is None and self.wait is None


Heads = Mapping[int, datetime]
"""Of each priority that has a task to start: when its first one was due."""


class Fairness:
    """Whose turn it is, and what the queue remembers of it, while tasks start one after the other at one moment."""

    __slots__ = ("_after", "_bucket", "_horizon", "_let_in_at", "_now", "_passed")

    def __init__(self, turns: FairnessState, patience: Patience, now: datetime) -> None:
        self._passed, self._let_in_at, self._bucket = list(turns.passed_over), list(turns.last_favored_at), turns.bucket
        self._after, self._now = patience.after, now
        self._horizon = None if patience.wait is None else now - patience.wait

    @property
    def turns(self) -> FairnessState:
        return FairnessState(tuple(self._passed), tuple(self._let_in_at), self._bucket)

    def choose(self, heads: Heads) -> tuple[int, int | None]:
        """The priority whose first task starts now; and for how many starts in a row that stays so while nothing else
        changes, None being any number. `heads` is not empty."""
        top = min(heads)
        if len(heads) == 1:
            return top, None
        horizon, after, passed = self._horizon, self._after, self._passed
        most, longest = -1, top
        for level in heads:
            if level != top and (passed[level] > most or (passed[level] == most and level < longest)):
                most, longest = passed[level], level
        if horizon is not None and min(heads.values()) <= horizon and (late := self._late(heads, top, horizon)):
            return min(late)[1], 1
        if after is None:
            return top, None
        return (longest, 1) if most >= after else (top, after - most)

    def _late(self, heads: Heads, top: int, horizon: datetime) -> list[tuple[datetime, int]]:
        """Who waits for too long, and since when. That counts from when it was last let in: a backlog older than the
        patience lets one in per wait, else it would turn the order of priorities round for as long as it lasts."""
        since = [(max(due_at, self._let_in(level) or due_at), level) for level, due_at in heads.items()]
        return [(at, level) for at, level in since if level != top and at <= horizon]

    def _let_in(self, level: int) -> datetime | None:
        """When it was; a time to come is that of a clock that has been set back since."""
        at = self._let_in_at[level]
        return at if at is not None and at <= self._now else None

    def note(self, count: int, level: int, heads: Heads) -> None:
        """The first `count` tasks of `level`, one of `heads`, have started one after the other. A priority that has no
        task to start is left as it is: another node may have room for what this one has none for."""
        is_let_in = False
        if self._after is not None:
            self._passed[level] = 0
        for other in heads:
            if other < level:
                is_let_in = True
            elif other > level and self._after is not None:
                self._passed[other] += count
        if is_let_in and self._horizon is not None:
            self._let_in_at[level] = self._now
