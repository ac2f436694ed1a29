"""Turns over one PostgreSQL database: each is one call of a procedure, tried again where others were in its way.

What holds it up and concerns only a part of it is refused or sent apart: an add that cannot be stored, or one that
waits for a transaction of somebody else's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec

from taskyard.errors import InvalidInput, OutcomeUnknown, StoreError, SubmitPending, TaskyardError
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.task import Claim
from taskyard.ports.clock import Clock
from taskyard.ports.store import Add, Added, Report, Turned
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.constants import INSERT_BLOCKED
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.errors import LOST, busy, describe, is_replaced, typed_errors
from taskyard.stores.postgres.patience import TRIES, give_way
from taskyard.stores.postgres.turn import CALL, Turn
from taskyard.stores.postgres.upkeep import Upkeep

log = logging.getLogger("taskyard")

HISTORY = frozenset({"finished", "attempt"})
"""Where no add is stored: what is there twice is an end, and stays so however often it is sent."""


class _InsertBlocked(Exception):
    """A uuid or a slot of a new task stands in a transaction that somebody keeps open."""


class Turning:
    def __init__(self, db: Database, upkeep: Upkeep, clock: Clock) -> None:
        self._db, self._upkeep, self._clock = db, upkeep, clock
        self._leapt: weakref.WeakSet[Connection] = weakref.WeakSet()

    async def turn(
        self,
        node: str,
        settles: Sequence[tuple[Claim, Move]],
        adds: Sequence[Add],
        reports: Sequence[Report],
        demand: Demand | None,
    ) -> Turned:
        try:
            return await self._turn(Turn(node, self._clock.now(), settles, adds, reports, demand), adds)
        except _InsertBlocked:
            turned = await self._turn(Turn(node, self._clock.now(), settles, (), reports, demand))
            return msgspec.structs.replace(turned, added=await self._add_apart(node, adds))

    async def _turn(self, turn: Turn, adds: Sequence[Add] = ()) -> Turned:
        row = await self._call(turn)
        try:
            turned = turn.answer(row)
        except Exception as exc:
            raise _unread(exc) from exc
        if row["hinted"]:
            self._db.hints.hold_back()
        elif _concerns_others(turned, row["told"], adds):
            self._db.hints.tell(turn.news())
        if turned.ended:
            self._db.hints.tell()  # nobody could know beforehand
        self._upkeep.after_turn(row["told"])
        return turned

    async def _add_apart(self, node: str, adds: Sequence[Add]) -> list[list[Added] | TaskyardError]:
        """Of these adds one or a few would have to wait for a transaction of somebody else's: the others go without
        them."""
        try:
            turn = Turn(node, self._clock.now(), (), adds, (), None)
            turn.is_careful = True  # only such a turn tells an insert that is blocked
            return (await self._turn(turn, adds)).added
        except _InsertBlocked:
            if len(adds) == 1:
                return [SubmitPending()]
            half = len(adds) // 2
            return await self._add_apart(node, adds[:half]) + await self._add_apart(node, adds[half:])
        except Exception as error:  # which is theirs alone: the rest of the turn has happened
            return [error if isinstance(error, TaskyardError) else OutcomeUnknown(describe(error))] * len(adds)

    async def _call(self, turn: Turn) -> Any:
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            try:
                async with self._db.turns.use() as conn:
                    if conn not in self._leapt:
                        await self._leap(conn)
                        self._leapt.add(conn)
                    return await self._send(conn, turn)
            except asyncpg.UniqueViolationError as exc:
                if exc.table_name in HISTORY:
                    raise InvalidInput(f"this cannot be stored: {describe(exc)}") from exc
                turn.is_careful = True  # a uuid or a slot is taken: look at each add by itself
            except asyncpg.LockNotAvailableError:
                turn.is_careful = True  # it then says whether it was an insert that waited
            except asyncpg.TransactionRollbackError:
                pass  # two turns got in each other's way: one of them has to start again
            except StoreError as error:
                if not is_replaced(error.__cause__, n):
                    raise
            except (asyncpg.DataError, asyncpg.CheckViolationError, asyncpg.ProgramLimitExceededError) as exc:
                is_too_much = isinstance(exc, asyncpg.ProgramLimitExceededError)
                if not turn.refuse_unstorable() and not (is_too_much and turn.claim_less()):
                    raise InvalidInput(f"this cannot be stored: {describe(exc)}") from exc
        raise busy(self._db.url)

    async def _send(self, conn: Connection, turn: Turn) -> Any:
        retried = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError, asyncpg.ProgramLimitExceededError)
        arguments = turn.arguments(self._db.hints.offer(turn.news()))
        try:
            return await conn.fetchrow(CALL, *arguments)
        except (*retried, asyncpg.TransactionRollbackError):
            raise
        except asyncpg.LockNotAvailableError as exc:
            if turn.is_careful or not turn.has_adds:
                raise busy(self._db.url) from exc
            raise
        except (*LOST, asyncpg.PostgresError) as exc:
            if getattr(exc, "sqlstate", None) == INSERT_BLOCKED:
                raise _InsertBlocked from exc
            with typed_errors(self._db.url, writes=True):
                raise
        except Exception as exc:
            raise _unread(exc) from exc

    async def _leap(self, conn: Connection) -> None:
        """Before the first turn over a connection: behind it may be a server that has taken over from another."""
        with typed_errors(self._db.url):
            if await conn.fetchval("SELECT taskyard.skip_numbers_1()"):
                log.warning("this database has come to another server, or was recovered: ids and tokens leap ahead")


def _unread(error: Exception) -> OutcomeUnknown:
    """An answer comes after the commit: if it cannot be read, the turn has happened, and what it did is not known."""
    log.error("what the database has answered cannot be read", exc_info=error)
    return OutcomeUnknown(describe(error))


def _concerns_others(turned: Turned, told: int, adds: Sequence[Add]) -> bool:
    """Others hear of what they may start, or wait for; that this node has started something is nothing to them, be it
    new or old."""
    if turned.settled or told > len(turned.claims) * 2:
        return True
    new = {record.uuid for add in adds for record in add.records}
    return told > len(turned.claims) + sum(claim.uuid in new for claim in turned.claims)
