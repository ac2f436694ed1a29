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


class Turns(msgspec.Struct, frozen=True, gc=False):
    """What a queue remembers, for every node: of each priority, how many higher ones have started since it last had its
    turn while it had a task to start, and when it was last let in before a higher one; and the bucket served last."""

    passed: tuple[int, ...] = NOT_PASSED
    let_in_at: tuple[datetime | None, ...] = NEVER
    bucket: str | None = None


NO_TURNS = Turns()


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


def choose(heads: Heads, turns: Turns, patience: Patience, now: datetime) -> int:
    """The priority whose first task starts now. `heads` is not empty."""
    top = min(heads)
    lower = sorted(level for level in heads if level > top)
    if patience.wait is not None:
        # Counted from when it was last let in: a backlog older than the patience lets one in per wait, else it would
        # turn the order of priorities round for as long as it lasts.
        since = {level: max(heads[level], _let_in(turns, level, now) or heads[level]) for level in lower}
        late = [level for level in lower if now - since[level] >= patience.wait]
        if late:
            return min(late, key=lambda level: (since[level], level))
    if patience.after is not None:
        passed = [level for level in lower if turns.passed[level] >= (patience.after or 0)]
        if passed:
            return min(passed, key=lambda level: (-turns.passed[level], level))
    return top


def _let_in(turns: Turns, level: int, now: datetime) -> datetime | None:
    """When it was; a time to come is that of a clock that has been set back since."""
    at = turns.let_in_at[level]
    return at if at is not None and at <= now else None


def note_start(level: int, heads: Heads, turns: Turns, patience: Patience, now: datetime) -> Turns:
    """What the queue remembers once the first task of `level`, one of `heads`, has started. A priority that has no task
    to start is left as it is: another node may have room for what this one has none for."""
    passed, let_in_at = turns.passed, turns.let_in_at
    if patience.after is not None:
        counted = tuple(
            0 if other == level else n + (other in heads and other > level) for other, n in enumerate(passed)
        )
        passed = counted if counted != passed else passed
    if patience.wait is not None and level != min(heads):
        let_in_at = (*let_in_at[:level], now, *let_in_at[level + 1 :])
    if passed is turns.passed and let_in_at is turns.let_in_at:
        return turns
    return Turns(passed, let_in_at, turns.bucket)
