"""How others see that a node does not live any more.

A node counts its beats. The others remember when they first saw the counter at its value, each by its own monotonic
clock: no clock is compared with another, and none may step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Beat(NamedTuple):
    """How often a node has beaten, and how long it may be silent, as it says itself."""

    n: int
    lease_s: float


class Pulses:
    """What this process has seen of the beats of others."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, beats: dict[str, Beat]) -> list[str]:
        """Those that have not beaten for a whole lease of theirs, as far as we have seen."""
        now = self._monotonic()
        seen: dict[str, tuple[int, float]] = {}
        for node, beat in beats.items():
            before = self._seen.get(node)
            seen[node] = before if before is not None and before[0] == beat.n else (beat.n, now)
        self._seen = seen
        return [node for node, (_, since) in seen.items() if now - since >= beats[node].lease_s]

    def beats_of(self, node: str) -> int | None:
        """What its counter was when it was last looked at."""
        return self._seen[node][0] if node in self._seen else None
