"""The nodes of one PostgreSQL database: they come and go, are told to drain, and what the dead ones held is taken back.

A node is dead when this process has not seen its counter move for its lease; one of this process never is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from taskyard.errors import UnknownNode
from taskyard.model.audit import AuditEntry
from taskyard.model.beats import Pulses
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.node import SKEW_S, Node
from taskyard.ports.clock import Clock
from taskyard.ports.store import News
from taskyard.stores.postgres import commands, reader
from taskyard.stores.postgres.audit import encode_entry
from taskyard.stores.postgres.database import Database

log = logging.getLogger("taskyard")

_INFO = "SELECT info, beats FROM taskyard.node WHERE incarnation = $1"


class Nodes:
    _pulses: Pulses

    def __init__(self, db: Database, clock: Clock, *, lease_s: float) -> None:
        self._db, self._clock, self._lease_s = db, clock, lease_s
        self._joined: set[str] = set()
        self._ahead_s: float | None = None

    def open(self) -> None:
        """Who lives is looked at anew."""
        self._pulses = Pulses(self._clock.monotonic)

    async def join(self, node: Node, specs: Sequence[ConsumerSpec]) -> None:
        self._joined.add(node.incarnation)
        await self._compare_clocks()
        sql = "SELECT taskyard.join_node_1($1, $2, $3, $4, $5)"
        now = self._clock.now()
        await self._db.write(sql, node.incarnation, self._info(node), self._lease_s, _encode(specs), now)
        self._db.hints.tell(News.NODES)

    async def _compare_clocks(self) -> None:
        now = await self._db.read(lambda conn: conn.fetchval("SELECT clock_timestamp()"))
        self._ahead_s = (self._clock.now() - now).total_seconds()
        if abs(self._ahead_s) > SKEW_S:
            side = "ahead of" if self._ahead_s > 0 else "behind"
            log.warning(
                "the clock of this node is %.0f s %s the database's: what is to run at a time runs too early or too "
                "late here; set it right",
                abs(self._ahead_s),
                side,
            )

    def _info(self, node: Node) -> str:
        return msgspec.json.encode(msgspec.structs.asdict(node) | {"ahead_s": self._ahead_s}).decode()

    async def describe(self, node: Node, specs: Sequence[ConsumerSpec]) -> None:
        sql, now = "SELECT taskyard.describe_node_1($1, $2, $3, $4)", self._clock.now()
        await self._db.write(sql, node.incarnation, self._info(node), _encode(specs), now)
        self._db.hints.tell(News.NODES)

    async def leave(self, incarnation: str) -> None:
        row = await self._db.write("SELECT taskyard.leave_node_1($1, $2)", incarnation, self._clock.now())
        self._joined.discard(incarnation)
        if not row[0]:
            log.warning("node %s leaves while it holds tasks; the others will take them back", incarnation[:8])
        self._db.hints.tell(News.NODES)

    async def drain(self, incarnation: str, on: bool, audit: AuditEntry | None) -> None:
        row = await self._db.write("SELECT taskyard.drain_node_1($1, $2, $3)", incarnation, on, encode_entry(audit))
        if not row[0]:
            raise UnknownNode(incarnation)
        self._db.hints.tell(News.NODES)

    async def dead_nodes(self) -> list[str]:
        beats, snapshot = await self._db.read(reader.beats)
        # A node asks this once a second: whether anybody has written is then answered as well.
        self._db.hints.saw(snapshot)
        dead = self._pulses.look(beats)
        return [incarnation for incarnation in dead if incarnation not in self._joined]

    async def rescue(self, incarnation: str) -> list[str]:
        info, beats = await self._db.read(lambda conn: conn.fetchrow(_INFO, incarnation)) or (None, None)
        if (seen := self._pulses.beats_of(incarnation)) is not None:
            beats = seen
        if incarnation in self._joined:
            beats = None  # one of our own may be taken back whatever it says
        arguments = commands.rescue_arguments(incarnation, info, beats, self._clock.now())
        rescued: list[str] = (await self._db.write(commands.RESCUE, *arguments))["uuids"] or []
        self._db.hints.tell(News.NODES)
        return rescued


def _encode(specs: Sequence[ConsumerSpec]) -> str:
    rows = [{"name": spec.name, "hash": spec.hash, "spec": msgspec.json.encode(spec).decode()} for spec in specs]
    return msgspec.json.encode(rows).decode()
