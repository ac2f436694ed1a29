"""How a node says that it lives, and how others see that it does not.

A node adds one to its own counter. The others remember when they first saw it at its value, each by its own monotonic
clock: no clock is compared with another, and none may step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from taskyard.ports.store import BEATS_PER_LEASE
from taskyard.stores.postgres.connection import Connection, connect
from taskyard.stores.postgres.errors import typed_errors

LEASE_S = 15.0


class PostgresLease:
    """The beats of one node, on a connection of its own."""

    def __init__(self, url: str, incarnation: str, *, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._url, self._incarnation = url, incarnation
        self._conn: Connection | None = None

    async def open(self) -> None:
        # A beat that takes longer than that is as good as lost; the next one is better made on a new connection.
        # It need not be on disk: after a crash of the server everybody has to beat again anyway.
        self._conn = await connect(
            self._url, settings={"synchronous_commit": "off"}, command_s=self.lease_s / BEATS_PER_LEASE
        )

    async def beat(self) -> bool:
        if self._conn is None or self._conn.is_closed():
            await self.close()
            await self.open()
        assert self._conn is not None
        try:
            with typed_errors(self._url, writes=True):
                done = await self._conn.execute(
                    "UPDATE taskyard.node SET beats = beats + 1, beat_at = now() WHERE incarnation = $1",
                    self._incarnation,
                )
        except BaseException:
            self._conn.terminate()
            raise
        return done == "UPDATE 1"

    async def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.terminate()


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
