"""The port over one PostgreSQL database."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import asyncpg
import msgspec

from taskyard.errors import (
    ForkedStore,
    InvalidInput,
    NotOpen,
    OutcomeUnknown,
    StoreBusy,
    StoreError,
    StoreUnavailable,
    SubmitPending,
    TaskyardError,
    UnknownNode,
    hide_password,
)
from taskyard.model.beats import Pulses
from taskyard.model.command import Asked, Command, Retry, anchor_of
from taskyard.model.control import UNTOUCHED, QueueCommand, QueueControl, steer, told_as
from taskyard.model.event import EventPage
from taskyard.model.failures import FailureGroup
from taskyard.model.limits import Demand, QueueSettings
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Outcome, Run, TaskRecord
from taskyard.model.why import Scene
from taskyard.ports.clock import Clock
from taskyard.ports.store import (
    ANY,
    SKEW_S,
    Add,
    Added,
    Applied,
    News,
    Node,
    NodeStatus,
    QueueStatus,
    Report,
    Schema,
    Signals,
    TaskFilter,
    Turned,
)
from taskyard.stores.migrate import schema_at
from taskyard.stores.postgres import commands, reader, windows, within
from taskyard.stores.postgres.connection import COMMAND_S, PLANS, READS, Connection, Session, once
from taskyard.stores.postgres.errors import busy, describe, read_only, typed_errors
from taskyard.stores.postgres.gate import Gate
from taskyard.stores.postgres.hints import Hints
from taskyard.stores.postgres.lease import LEASE_S, PostgresLease
from taskyard.stores.postgres.link import Links
from taskyard.stores.postgres.patience import TRIES, give_way
from taskyard.stores.postgres.scene import find_scene
from taskyard.stores.postgres.schedules import ScheduleVerbs
from taskyard.stores.postgres.schema import check_version, find_version, migrate
from taskyard.stores.postgres.turn import CALL, Lane, Turn

log = logging.getLogger("taskyard")

T = TypeVar("T")

APPLY_AT_MOST = 500

RING = 10_000
"""Events kept for readers that fall behind."""

TIDY_AFTER = 2_000
"""Events that this process writes between two looks whether there are too many. A turn counts for ten at least: what it
has counted is to be put together as well, before claims from queues with a limit have much to add up."""


class _UuidHeld(Exception):
    """A new task has a uuid that another has which was submitted in a transaction that has not ended."""


class PostgresStore(ScheduleVerbs):
    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        lease_s: float = LEASE_S,
        command_s: float = COMMAND_S,
        pool_size: int = 10,
        pool_overflow: int = 10,
    ) -> None:
        """`lease_s` is how long a node may be silent before the others take over what it runs.
        `command_s` is how long an answer of the database is waited for. Of the connections for reading, `pool_size` are
        kept open, and `pool_overflow` more are opened while all of them are busy."""
        self.url = url
        self._clock = clock
        self._lease_s, self._command_s = lease_s, command_s
        self._pool_size, self._pool_overflow = pool_size, pool_overflow
        self._pid = 0
        self._is_open = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._lanes: set[Lane] = set()
        self._joined: set[str] = set()
        self._written = 0
        self._tidying: asyncio.Task[None] | None = None
        self._where = ""
        self._ahead_s: float | None = None
        self._ghosts: set[Session] = set()
        """Sessions with which the connection was lost."""

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._is_open:
            raise InvalidInput(f"the store {hide_password(self.url)} is open already; make another for another yard")
        self._pid = os.getpid()
        self._speaking = asyncio.Lock()
        await once(self.url, partial(migrate, url=self.url))
        gate = Gate()
        links = partial(Links, self.url, gate, command_s=self._command_s)
        self._turns = links(most=1, settings=PLANS, ghosts=self._ghosts)
        self._writes = links(most=2, settings=PLANS, ghosts=self._ghosts)
        self._reads = links(most=self._pool_size + self._pool_overflow, keep=self._pool_size, settings=READS)
        self._hints = Hints(self.url, gate, self._reads)
        self._transactions = within.Transactions(self._hints.tell_all)
        self._pulses = Pulses(self._clock.monotonic)
        self._lanes.clear()
        self._is_open = True

    async def schema(self) -> Schema:
        version = await once(self.url, find_version)
        check_version(version, self.url)
        return schema_at(version, "postgres")

    async def migrate(self) -> Schema:
        return schema_at(await once(self.url, self._migrate), "postgres")

    async def _migrate(self, conn: Connection) -> int:
        """Not on a standby, also if there is nothing to do: whoever asks wants to write. One may look there."""
        if await conn.fetchval("SELECT pg_is_in_recovery()"):
            raise read_only(self.url)
        return await migrate(conn, self.url)

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._transactions.close()
        await self._hints.close()
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        if self._tidying is not None:
            await asyncio.wait([self._tidying])
        for links in (self._turns, self._writes, self._reads):
            await links.close()

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """Closing waits for what was asked before."""
        if not self._is_open:
            raise NotOpen("the store is not open; use it inside `async with yard`")
        if os.getpid() != self._pid:
            raise ForkedStore
        self._in_flight += 1
        try:
            if self._ghosts:
                await self._lay_ghosts()
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _lay_ghosts(self) -> None:
        """Race: what was sent over a lost connection may still be on its way to the server, or wait there for a lock.
        What it claims after we have looked, nobody would run. So its session is ended, with all that it has not done
        yet, before anything else is asked."""
        within_ms = int(self._command_s * 500)
        for session in list(self._ghosts):
            if not await self._read(partial(reader.end_session, session=session, within_ms=within_ms)):
                pid, _ = session
                raise StoreUnavailable(f"a session of ours (pid {pid}) on {hide_password(self.url)} does not end")
            self._ghosts.discard(session)

    async def _write(self, sql: str, *arguments: Any, links: Links | None = None) -> Any:
        """The row that a call answers with. What another transaction got in the way of is tried again."""
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            try:
                async with (links or self._writes).use() as conn:
                    with typed_errors(self.url, writes=True):
                        return await conn.fetchrow(sql, *arguments)
            except StoreBusy as error:
                if not isinstance(error.__cause__, asyncpg.TransactionRollbackError):
                    raise
        raise busy(self.url)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def turn(
        self,
        node: str,
        *,
        settles: Sequence[tuple[Claim, Move]] = (),
        adds: Sequence[Add] = (),
        reports: Sequence[Report] = (),
        demand: Demand | None = None,
    ) -> Turned:
        async with self._asked():
            try:
                return await self._turn(Turn(node, self._clock.now(), settles, adds, reports, demand), adds)
            except _UuidHeld:
                turned = await self._turn(Turn(node, self._clock.now(), settles, (), reports, demand))
                return msgspec.structs.replace(turned, added=await self._add_apart(node, adds))

    async def _turn(self, turn: Turn, adds: Sequence[Add] = ()) -> Turned:
        if adds:
            await self._make_lanes(turn)
        row = await self._call(turn)
        turned = await self._tell_windows(turn.answer(row), adds)
        if row["hinted"]:
            self._hints.hold_back()
        elif _concerns_others(turned, row["told"], adds):
            self._hints.tell(turn.news())
        if turned.ended:
            self._hints.tell()  # nobody could know beforehand
        self._tidy_after(row["told"])
        return turned

    async def _tell_windows(self, turned: Turned, adds: Sequence[Add]) -> Turned:
        slots = windows.slots_of(adds, turned.added)
        if not slots:
            return turned
        try:
            ends = await self._read(partial(windows.read_ends, slots=slots))
        except StoreError as error:
            log.debug("when windows end was not found out: %s", error)  # the turn has happened
            return turned
        added = [windows.told(add, answer, ends) for add, answer in zip(adds, turned.added, strict=True)]
        return msgspec.structs.replace(turned, added=added)

    async def _add_apart(self, node: str, adds: Sequence[Add]) -> list[list[Added] | TaskyardError]:
        """Of these adds one or a few would have to wait for a transaction of somebody else's: the others go without
        them."""
        try:
            return (await self._turn(Turn(node, self._clock.now(), (), adds, (), None), adds)).added
        except _UuidHeld:
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
                async with self._turns.use() as conn:
                    return await self._send(conn, turn)
            except asyncpg.UniqueViolationError:
                turn.is_careful = True  # a uuid or a slot is taken: look at each add by itself
            except asyncpg.TransactionRollbackError:
                pass  # two turns got in each other's way: one of them has to start again
            except (asyncpg.DataError, asyncpg.CheckViolationError, asyncpg.ProgramLimitExceededError) as exc:
                is_too_much = isinstance(exc, asyncpg.ProgramLimitExceededError)
                if not turn.refuse_unstorable() and not (is_too_much and turn.claim_less()):
                    raise InvalidInput(f"this cannot be stored: {describe(exc)}") from exc
        raise busy(self.url)

    async def _send(self, conn: Connection, turn: Turn) -> Any:
        retried = (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError, asyncpg.ProgramLimitExceededError)
        try:
            return await conn.fetchrow(CALL, *turn.arguments(self._hints.offer(turn.news())))
        except (*retried, asyncpg.TransactionRollbackError):
            raise
        except asyncpg.LockNotAvailableError as exc:
            if re.search(r"\badd_1\(", str(exc.context)):  # and not where turns wait for each other
                raise _UuidHeld from exc
            raise busy(self.url) from exc
        except Exception:
            with typed_errors(self.url, writes=True):
                raise

    async def _make_lanes(self, turn: Turn) -> None:
        """Before the turn: a row that another transaction is just inserting must not keep it waiting."""
        for lane in sorted(turn.lanes() - self._lanes):
            if lane not in turn.lanes():
                continue  # what was to stand there has been refused meanwhile
            queue, source, priority = lane
            try:
                await self._write(
                    f"INSERT INTO taskyard.lane AS l (queue, source, low_{int(priority)}) VALUES ($1, $2, 0) "
                    f"ON CONFLICT (queue, source) DO UPDATE SET low_{int(priority)} = 0 "
                    f"WHERE l.low_{int(priority)} IS NULL",
                    queue,
                    source,
                )
            except (StoreError, InvalidInput):
                if turn.refuse_unstorable():
                    continue
                raise
            self._lanes.add(lane)

    def _tidy_after(self, told: int) -> None:
        self._written += max(told, 10)
        if self._written >= TIDY_AFTER and self._tidying is None:
            self._written = 0
            self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    async def _tidy(self) -> None:
        try:
            await self._write("SELECT taskyard.tidy_1($1)", RING)
        except StoreError as error:
            log.debug("events were not trimmed: %s", error)  # the next time will do
        finally:
            self._tidying = None

    async def add_within(self, connection: object, add: Add) -> list[Added]:
        async with self._asked():
            where = await self._find_where()
            return await within.add_within(connection, add, url=self.url, where=where, transactions=self._transactions)

    async def _find_where(self) -> str:
        """Which database this is."""
        if not self._where:
            self._where = await self._read(lambda conn: conn.fetchval(within.WHEREABOUTS))
        return self._where

    # --- commands, nodes, retention -----------------------------------------------------------------------------------

    async def apply(
        self, uuids: Sequence[str], command: Command, *, by: str = "", where: TaskFilter = ANY
    ) -> list[Applied]:
        applied: list[Applied] = []
        async with self._asked():
            for start in range(0, len(uuids), APPLY_AT_MOST):
                applied += await self._apply(uuids[start : start + APPLY_AT_MOST], command, by, where)
        return applied

    async def _apply(self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter) -> list[Applied]:
        """Those that changed between the look and the lock are decided again, and only those: beside a busy queue the
        first in line change all the time."""
        answers: dict[int, Applied] = {}
        left = list(range(len(uuids)))
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            decided = await self._decide_on([uuids[i] for i in left], command, by, where)
            stale: list[str] = []
            if not decided.changes_nothing:
                row = await self._write(commands.CHANGE, *decided.arguments())
                decided.place(row["places"])
                stale = row["stale"]
                self._hints.tell()
            if decided.lost:
                await self._write(commands.EXPLAIN, *map(list, zip(*decided.lost, strict=True)))
            answers |= dict(zip(left, decided.applied, strict=True))
            left = [i for i in left if uuids[i] in stale]
            if not left:
                break
            if n == TRIES - 1:
                answers |= {i: decided.give_up(uuids[i]) for i in left}
        return [answers[i] for i in range(len(uuids))]

    async def _decide_on(self, uuids: Sequence[str], command: Command, by: str, where: TaskFilter) -> commands.Decided:
        asked, other = Asked(command=command, now=self._clock.now(), by=by), anchor_of(command)
        found = await self._read(partial(commands.read, uuids=uuids if other is None else [*uuids, other]))
        anchor = None if other is None else found.get(other)
        if anchor is not None:
            order = await self._read(partial(commands.read_order, queue=anchor[0].queue))
            asked = msgspec.structs.replace(asked, order=order, anchor=anchor[0].clone())
        records = [record for record, _ in found.values()] if isinstance(command, Retry) else []
        bonds = await self._read(partial(commands.read_bonds, records=records, now=asked.now))
        decided = commands.Decided(asked, where, bonds, anchor=anchor)
        for uuid in uuids:
            decided.decide(uuid, found.get(uuid))
        return decided

    async def control(self, queue: str, command: QueueCommand, *, by: str) -> QueueStatus:
        async with self._asked():
            async with self._speaking:
                said = await self._control(queue, command, by)
            (status,) = await self._read(partial(reader.queues, name=queue))
            return msgspec.structs.replace(status, control=said)

    async def _control(self, queue: str, command: QueueCommand, by: str) -> QueueControl:
        """Decided on what was read without a lock, and kept if nobody has said anything since. Those of one process
        speak one after the other; who is in the way of another's has been heard, and lets him go first next time."""
        settings = msgspec.json.encode(QueueSettings(name=queue)).decode()
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            text = await self._read(partial(commands.read_control, queue=queue))
            old = UNTOUCHED if text is None else msgspec.json.decode(text, type=QueueControl)
            # Whether something runs the call itself looks, under the queue's lock.
            now = self._clock.now()
            new = steer(old, command, by=by, now=now, running=1)
            kind = told_as(old, new)
            if kind is None:
                return old
            said = msgspec.json.encode(new).decode()
            row = await self._write(commands.CONTROL, queue, settings, text, said, kind, now)
            if row["done"]:
                self._hints.tell()
                return msgspec.json.decode(row["said"], type=QueueControl)
        raise busy(self.url)

    async def queues(self) -> list[QueueStatus]:
        return await self._ask(reader.queues)

    async def set_queue(self, settings: QueueSettings) -> None:
        async with self._asked():
            row = await self._write(
                "CALL taskyard.queue_1($1, $2, $3, $4, $5, $6, $7, $8, NULL)",
                settings.name,
                settings.concurrency,
                settings.per_key,
                settings.auto_recover,
                msgspec.json.encode(settings).decode(),
                settings.order,
                settings.starve_after,
                settings.patience.wait,
            )
            if row["changed"]:
                self._hints.tell()

    async def join(self, node: Node) -> None:
        async with self._asked():
            self._joined.add(node.incarnation)
            await self._compare_clocks()
            await self._write(
                "INSERT INTO taskyard.node (incarnation, info, lease_s) VALUES ($1, $2, $3) "
                "ON CONFLICT (incarnation) DO UPDATE SET info = excluded.info, lease_s = excluded.lease_s, "
                "beats = node.beats + 1, beat_at = now(), is_draining = false",
                node.incarnation,
                self._info(node),
                self._lease_s,
            )
            self._hints.tell(News.NODES)

    async def _compare_clocks(self) -> None:
        now = await self._read(lambda conn: conn.fetchval("SELECT clock_timestamp()"))
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

    async def describe(self, node: Node) -> None:
        async with self._asked():
            info = self._info(node)
            await self._write(
                "UPDATE taskyard.node SET info = $2 WHERE incarnation = $1 RETURNING 1", node.incarnation, info
            )
            self._hints.tell(News.NODES)

    async def leave(self, incarnation: str) -> None:
        async with self._asked():
            row = await self._write(
                "WITH busy AS (SELECT FROM taskyard.task WHERE state = 'running' AND node = $1 LIMIT 1), "
                "gone AS (DELETE FROM taskyard.node WHERE incarnation = $1 AND NOT EXISTS (SELECT FROM busy)) "
                "SELECT EXISTS (SELECT FROM busy)",
                incarnation,
            )
            self._joined.discard(incarnation)
            if row[0]:
                log.warning("node %s leaves while it holds tasks; the others will take them back", incarnation[:8])
            self._hints.tell(News.NODES)

    async def drain(self, incarnation: str, *, on: bool = True) -> None:
        async with self._asked():
            row = await self._write(
                "UPDATE taskyard.node SET is_draining = $2 WHERE incarnation = $1 RETURNING 1", incarnation, on
            )
            if row is None:
                raise UnknownNode(incarnation)
            self._hints.tell(News.NODES)

    async def dead_nodes(self) -> list[str]:
        beats, snapshot = await self._ask(reader.beats)
        # A node asks this once a second: whether anybody has written is then answered as well.
        self._hints.saw(snapshot)
        dead = self._pulses.look(beats)
        return [incarnation for incarnation in dead if incarnation not in self._joined]

    async def rescue(self, incarnation: str) -> list[str]:
        async with self._asked():
            info, beats = await self._read(lambda conn: conn.fetchrow(_INFO, incarnation)) or (None, None)
            if (seen := self._pulses.beats_of(incarnation)) is not None:
                beats = seen
            if incarnation in self._joined:
                beats = None  # one of our own may be taken back whatever it says
            arguments = commands.rescue_arguments(incarnation, info, beats, self._clock.now())
            rescued: list[str] = (await self._write(commands.RESCUE, *arguments))["uuids"] or []
            self._hints.tell(News.NODES)
            return rescued

    def lease(self, incarnation: str) -> PostgresLease:
        return PostgresLease(self.url, incarnation, lease_s=self._lease_s)

    async def find_end(self, n: int, *, failed: bool | None = None) -> datetime | None:
        return await self._ask(lambda conn: reader.find_end(conn, n, failed))

    async def prune(self, *, finished_before: datetime, limit: int = 500, failed: bool | None = None) -> int:
        async with self._asked():
            age = self._clock.now() - finished_before
            row = await self._write("SELECT taskyard.prune_1($1, $2, $3, $4)", finished_before, age, limit, failed)
            pruned: int = row[0]
            return pruned

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self, run: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._reads.use() as conn:
            with typed_errors(self.url):
                return await run(conn)

    async def _ask(self, run: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._asked():
            return await self._read(run)

    async def signals(self, node: str) -> Signals:
        return await self._ask(partial(reader.signals, node=node))

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return await self._ask(partial(reader.outcomes, uuids=uuids))

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        if self._tidying is not None:
            await asyncio.wait([self._tidying])  # it takes milliseconds, and `missed` is then the last word
        return await self._ask(partial(reader.events, after=after, limit=limit))

    async def find(self, uuid: str) -> TaskRecord | None:
        return await self._ask(partial(reader.find, uuid=uuid))

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return await self._ask(partial(reader.list_uuids, fragment=fragment, limit=limit))

    async def list_tasks(
        self, where: TaskFilter = ANY, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return await self._ask(partial(reader.list_tasks, where=where, before_id=before_id, limit=limit))

    async def list_ids(
        self, where: TaskFilter = ANY, *, before_id: int | None = None, limit: int = 500
    ) -> list[tuple[int, str]]:
        return await self._ask(partial(reader.list_ids, where=where, before_id=before_id, limit=limit))

    async def list_origins(self, uuids: Sequence[str]) -> set[str]:
        return await self._ask(partial(reader.list_origins, uuids=uuids))

    async def list_runs(self, uuid: str) -> list[Run]:
        return await self._ask(partial(reader.list_runs, uuid=uuid))

    async def scene(self, records: Sequence[TaskRecord]) -> Scene:
        now = self._clock.now()
        return await self._ask(partial(find_scene, records=records, now=now))

    async def failures(self, where: TaskFilter = ANY, *, limit: int = 100) -> list[FailureGroup]:
        return await self._ask(lambda conn: reader.failures(conn, where, limit))

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return await self._ask(reader.count)

    async def count_group(self, group: str) -> dict[TaskState, int]:
        return await self._ask(partial(reader.count_group, group=group))

    async def nodes(self) -> list[NodeStatus]:
        return await self._ask(reader.nodes)

    def watch(self, heard: Callable[[News], None]) -> None:
        self._hints.watch(heard)


_INFO = "SELECT info, beats FROM taskyard.node WHERE incarnation = $1"


def _concerns_others(turned: Turned, told: int, adds: Sequence[Add]) -> bool:
    """Others hear of what they may start, or wait for; that this node has started something is nothing to them, be it
    new or old."""
    if turned.settled or told > len(turned.claims) * 2:
        return True
    new = {record.uuid for add in adds for record in add.records}
    return told > len(turned.claims) + sum(claim.uuid in new for claim in turned.claims)
