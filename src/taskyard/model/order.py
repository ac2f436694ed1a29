"""Who goes first: priority, then place.

A place is an integer, handed out with gaps so that a task can later be put between two others. Floats would run out
after 52 moves into one gap; a gap of 2**20 leaves room for 8.8e12 tasks before a signed 64-bit integer does.
"""

from __future__ import annotations

from enum import IntEnum

from taskyard.errors import quote

GAP = 1 << 20


class Priority(IntEnum):
    """Smaller goes first, in Python as in SQL."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @classmethod
    def of(cls, value: Priority | str | int) -> Priority:
        """`Priority.of("high")`, `Priority.of(0)` and `Priority.of(Priority.HIGH)` are the same."""
        try:
            if isinstance(value, bool):
                raise KeyError(value)  # which would be 0 or 1
            return cls[value.upper()] if isinstance(value, str) else cls(value)
        except (KeyError, ValueError):
            raise ValueError(f"priority {quote(value)} is not one of high, normal, low") from None

    @property
    def label(self) -> str:
        return self.name.lower()


def tail_position(seq: int) -> int:
    """The place of what came as number `seq` of the store's one counter: behind all that came before it."""
    return seq * GAP


def head_position(seq: int) -> int:
    """The place of what was put at the head as number `seq`: before all tails, and before all earlier heads."""
    return -seq * GAP
