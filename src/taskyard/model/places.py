"""Places between others: a task that is put before or after another gets a number that was free, next to it.

Places that are handed out at the head or the tail are multiples of `GAP`, each given once in a store, so the numbers
around one belong to it. Between two multiples there is nothing but what was put there by hand, and that alone has to be
looked at, whatever the length of the queue. When the numbers at one spot are used up, those around it are spread out
again, over as small a stretch as is not too crowded: the smaller it is, the more crowded it may be, which keeps the
number of tasks that are moved for each insertion small, however many come to the same spot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from taskyard.errors import InvalidInput
from taskyard.model.order import GAP

SHARE = 16
"""A new place takes this part of the room there is, from the side it does not touch: tasks put one after the other
before the same one then take hundreds of places before the room is used up, where halving would take twenty."""

NO_PLACE_LEFT = "a million tasks were put between the same two already; move it elsewhere"

SMALLEST = 64
CROWDED, THINNING = 0.5, 1.2
"""How much of the smallest stretch may be taken, and by how much less of every one of twice the size."""


class Put(NamedTuple):
    """Where a task stands that was put somewhere by hand."""

    position: int
    id: int


class Puts(Protocol):
    """What was put by hand in one queue: all that has a position which is no multiple of `GAP`."""

    def nearest(self, position: int, *, below: bool) -> int | None:
        """The nearest position taken by hand that is smaller, or larger, than this one."""
        ...

    def between(self, low: int, high: int) -> Sequence[Put]:
        """All of them from `low` to `high`, both included, in order."""
        ...


class Placing(NamedTuple):
    """The place that is given, and whoever had to move for it, with his new place."""

    position: int
    moved: list[Put]


def place_beside(anchor: int, puts: Puts, *, before: bool) -> Placing:
    """A place right before the one at `anchor`, or right after it."""
    base = (anchor - 1) // GAP * GAP if before else anchor // GAP * GAP
    nearest = puts.nearest(anchor, below=before)
    if before:
        low, high = max(base, base if nearest is None else nearest), anchor
    else:
        low, high = anchor, min(base + GAP, base + GAP if nearest is None else nearest)
    room = high - low
    if room >= 2:
        step = max(1, room // SHARE)
        return Placing(low + step if before else high - step, [])
    return _spread(base, low, puts)


def _spread(base: int, low: int, puts: Puts) -> Placing:
    """A place right above `low`, for which others between `base` and the next multiple are spread out."""
    size, allowed = SMALLEST, CROWDED
    while size <= GAP:
        start = base + min((low - base) // size * size, GAP - size)
        first, last = max(start, base + 1), min(start + size, base + GAP) - 1
        crowd = puts.between(first, last)
        if len(crowd) + 1 <= (last - first + 1) * allowed or (size == GAP and len(crowd) < GAP - 1):
            return _place_all(first, last, crowd, sum(put.position <= low for put in crowd))
        size, allowed = size * 2, allowed / THINNING
    raise InvalidInput(NO_PLACE_LEFT)


def _place_all(first: int, last: int, crowd: Sequence[Put], at: int) -> Placing:
    """Spread out the crowd over first..last, with a place for one more, the `at`-th of them."""
    width, count = last - first + 1, len(crowd) + 1
    places = [first + (2 * n + 1) * width // (2 * count) for n in range(count)]
    position = places.pop(at)
    moved = [Put(place, put.id) for place, put in zip(places, crowd, strict=True) if place != put.position]
    return Placing(position, moved)
