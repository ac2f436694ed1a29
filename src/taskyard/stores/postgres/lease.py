"""How a node says that it lives: it adds one to its own counter."""

from __future__ import annotations

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
