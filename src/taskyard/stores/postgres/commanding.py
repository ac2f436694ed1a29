"""What people ask of tasks and queues, carried out on one PostgreSQL database.

It is decided on what was read without a lock, and carried out if that is still so; else it is read and decided again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from taskyard.errors import InvalidInput, StoreError
from taskyard.model.audit import AuditEntry
from taskyard.model.command import Asked, Command, Retry, anchor_of
from taskyard.model.places import NO_PLACE_LEFT
from taskyard.model.queue import (
    UNTOUCHED,
    QueueCommand,
    QueueControl,
    QueueSettings,
    QueueStatus,
    control_detail,
    steer,
    told_as,
)
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.store import Applied
from taskyard.stores.postgres import commands, reader
from taskyard.stores.postgres.audit import encode_entry
from taskyard.stores.postgres.constants import NO_PLACE
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.errors import busy
from taskyard.stores.postgres.patience import TRIES, give_way
from taskyard.stores.postgres.rows import to_text

APPLY_AT_MOST = 500


class Commanding:
    _speaking: asyncio.Lock

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db, self._clock = db, clock

    def open(self) -> None:
        self._speaking = asyncio.Lock()  # of this event loop

    async def apply(
        self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter, audit: AuditEntry | None
    ) -> list[Applied]:
        applied: list[Applied] = []
        for start in range(0, len(uuids), APPLY_AT_MOST):
            applied += await self._apply(uuids[start : start + APPLY_AT_MOST], command, by, where, audit)
        return applied

    async def _apply(
        self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter, audit: AuditEntry | None
    ) -> list[Applied]:
        """Those that changed between the look and the lock are decided again, and only those: beside a busy queue the
        first in line change all the time."""
        answers: dict[int, Applied] = {}
        left = list(range(len(uuids)))
        entry, uncounted = encode_entry(audit), len(uuids)
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            decided = await self._decide_on([uuids[i] for i in left], command, by, where)
            stale: list[str] = []
            if not decided.changes_nothing:
                row = await self._write(decided, entry, uncounted)
                decided.place(row["places"])
                stale = row["stale"]
                uncounted = uncounted if len(stale) >= decided.count else 0
                self._db.hints.tell()
            if decided.lost:
                await self._db.write(commands.EXPLAIN, *map(list, zip(*decided.lost, strict=True)))
            answers |= dict(zip(left, decided.applied, strict=True))
            left = [i for i in left if uuids[i] in stale]
            if not left:
                break
            if n == TRIES - 1:
                answers |= {i: decided.give_up(uuids[i]) for i in left}
        if uncounted and audit is not None and not audit.is_finished:
            await self._db.write(commands.NOTE_AUDIT, entry, uncounted)
        return [answers[i] for i in range(len(uuids))]

    async def _write(self, decided: commands.Decided, entry: str | None, matched: int) -> Any:
        try:
            return await self._db.write(commands.CHANGE, *decided.arguments(), entry, matched)
        except StoreError as exc:
            if getattr(exc.__cause__, "sqlstate", None) == NO_PLACE:
                raise InvalidInput(NO_PLACE_LEFT) from exc
            raise

    async def _decide_on(self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter) -> commands.Decided:
        asked, other = Asked(command=command, now=self._clock.now(), by=by), anchor_of(command)
        found = await self._db.read(partial(commands.read, uuids=uuids if other is None else [*uuids, other]))
        anchor = None if other is None else found.get(other)
        if anchor is not None:
            order = await self._db.read(partial(commands.read_order, queue=anchor[0].queue))
            asked = msgspec.structs.replace(asked, order=order, anchor=anchor[0].clone())
        records = [record for record, _ in found.values()] if isinstance(command, Retry) else []
        bonds = await self._db.read(partial(commands.read_bonds, records=records, now=asked.now))
        decided = commands.Decided(asked, where, bonds, anchor=anchor)
        for uuid in uuids:
            decided.decide(uuid, found.get(uuid))
        return decided

    async def control(self, queue: str, command: QueueCommand, by: str, audit: AuditEntry | None) -> QueueStatus:
        async with self._speaking:
            said = await self._control(queue, command, by, encode_entry(audit))
        (status,) = await self._db.read(partial(reader.queues, name=queue))
        return msgspec.structs.replace(status, control=said)

    async def _control(self, queue: str, command: QueueCommand, by: str, entry: str | None) -> QueueControl:
        """Decided on what was read without a lock, and kept if nobody has said anything since. Those of one process
        speak one after the other; who is in the way of another's has been heard, and lets him go first next time."""
        settings = msgspec.json.encode(QueueSettings(name=queue)).decode()
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            text = await self._db.read(partial(commands.read_control, queue=queue))
            old = UNTOUCHED if text is None else msgspec.json.decode(text, type=QueueControl)
            # Whether something runs the call itself looks, under the queue's lock.
            now = self._clock.now()
            new = steer(old, command, by=by, now=now, running=1)
            kind = told_as(old, new)
            if kind is None:
                return old
            said = msgspec.json.encode(new).decode()
            row = await self._db.write(
                commands.CONTROL, queue, settings, text, said, kind, to_text(control_detail(old, new)), now, entry
            )
            if row["done"]:
                self._db.hints.tell()
                return msgspec.json.decode(row["said"], type=QueueControl)
        raise busy(self._db.url)
