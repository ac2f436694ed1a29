"""The advisory locks on PostgreSQL, each by the first of its two numbers; SQL and Python mean the same ones."""

from __future__ import annotations

from enum import IntEnum


class Lock(IntEnum):
    QUEUE = 1953721201
    """Held by whoever changes what there is of a queue, but for who only completes plain runs."""
    ENDS = 1953721209
    """Of a queue, after the one above: shared by who only completes plain runs of it, left alone by who only claims,
    adds and promotes, held alone by all others."""
    NODE = 1953721202
    EVENTS = 1953721203
    """Held by whoever may write events."""
    OPEN_SLOT = 1953721204
    """Held for as long as somebody else's transaction is open in which a slot was taken."""
    MANY_SLOTS = 1953721211
    """Shared for as long as somebody else's transaction is open in which too many were taken to lock each of them."""
    SLOT = 1953721205
    TIDYING = 1953721206
    MIGRATING = 1953721207
    RULING = 1953721212
    """Of a queue, before its own: held for a step on the way of its rules to what waits there."""
    LEAPING = 1953721210
    HINT = 1953721208
    """Held by the one transaction that tells others with its commit."""
