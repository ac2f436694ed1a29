"""The port over one PostgreSQL database: each verb, and which part carries it out.

`Database` has the connections; turns, commands and nodes are parts over it, reading is functions of a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from taskyard.errors import ClaimLost, InvalidInput, hide_password
from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine
from taskyard.model.audit import ALL_ENTRIES, AuditEntry, AuditFilter
from taskyard.model.catalogue import ConsumerSpec, StoredSpec
from taskyard.model.command import Command
from taskyard.model.event import EventPage
from taskyard.model.failures import FailureGroup
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node, NodeStatus
from taskyard.model.queue import QueueCommand, QueueSettings, QueueStatus
from taskyard.model.queue_order import QueueSnapshot
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Claim, Outcome, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.why import Scene
from taskyard.ports.clock import Clock
from taskyard.ports.store import Add, Added, Applied, BlockedGroup, News, Report, Schema, Signals, Turned
from taskyard.stores.postgres import reader, within
from taskyard.stores.postgres.audit import PRUNE as PRUNE_AUDIT
from taskyard.stores.postgres.audit import PUT as PUT_AUDIT
from taskyard.stores.postgres.audit import encode_entry, list_audit
from taskyard.stores.postgres.commanding import Commanding
from taskyard.stores.postgres.connection import COMMAND_S, Connection, once
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.devices import DeviceVerbs
from taskyard.stores.postgres.errors import read_only
from taskyard.stores.postgres.lease import LEASE_S, PostgresLease
from taskyard.stores.postgres.nodes import Nodes
from taskyard.stores.postgres.rules import Rules
from taskyard.stores.postgres.scene import find_scene
from taskyard.stores.postgres.schedules import ScheduleVerbs
from taskyard.stores.postgres.schema import find_schema, migrate
from taskyard.stores.postgres.snapshot import find_medians, find_snapshot
from taskyard.stores.postgres.turning import Turning
from taskyard.stores.postgres.upkeep import Upkeep


class PostgresStore(ScheduleVerbs, DeviceVerbs):
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
        self._clock, self._lease_s = clock, lease_s
        self._db = Database(url, command_s=command_s, pool_size=pool_size, pool_overflow=pool_overflow)
        self._rules = Rules(self._db)
        self._upkeep = Upkeep(self._db, self._rules, clock)
        self._turning = Turning(self._db, self._upkeep, clock)
        self._commanding = Commanding(self._db, clock)
        self._nodes = Nodes(self._db, clock, lease_s=lease_s)
        self._is_closed = True

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if not self._is_closed:
            raise InvalidInput(f"the store {hide_password(self.url)} is open already; make another for another yard")
        await once(self.url, partial(migrate, url=self.url))
        self._db.open()
        self._is_closed = False
        self._transactions = within.Transactions(self._db.hints.tell_all)
        for part in (self._commanding, self._nodes):
            part.open()

    async def schema(self) -> Schema:
        return await once(self.url, partial(find_schema, url=self.url))

    async def migrate(self) -> Schema:
        return await once(self.url, self._migrate)

    async def _migrate(self, conn: Connection) -> Schema:
        """Not on a standby, also if there is nothing to do: whoever asks wants to write. One may look there."""
        if await conn.fetchval("SELECT pg_is_in_recovery()"):
            raise read_only(self.url)
        return await migrate(conn, self.url)

    async def close(self) -> None:
        """Whoever is cancelled meanwhile may ask for it again: it is closed when all of it has been."""
        if self._is_closed:
            return
        self._transactions.close()
        await self._db.finish()
        await self._upkeep.finish()
        await self._db.close()
        self._is_closed = True

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
        async with self._db.asked():
            return await self._turning.turn(node, settles, adds, reports, demand)

    async def preview(self, demand: Demand) -> list[TaskRecord]:
        return await self._db.ask(partial(reader.preview, demand=demand, now=self._clock.now()))

    async def add_within(self, connection: object, add: Add) -> list[Added]:
        async with self._db.asked():
            where = await self._db.find_where()
            if add.parent is not None and not await self._db.read(partial(reader.is_held, claim=add.parent)):
                raise ClaimLost(add.parent.uuid, add.parent.token)  # which a snapshot from before could not tell
            now, transactions = self._clock.now(), self._transactions
            return await within.add_within(connection, add, now, url=self.url, where=where, transactions=transactions)

    # --- commands, nodes, retention -----------------------------------------------------------------------------------

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        async with self._db.asked():
            return await self._commanding.apply(uuids, command, by, where, audit)

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = None
    ) -> QueueStatus:
        async with self._db.asked():
            return await self._commanding.control(queue, command, by, audit)

    async def queues(self) -> list[QueueStatus]:
        return await self._db.ask(reader.queues)

    async def set_queue(self, settings: QueueSettings) -> None:
        async with self._db.asked():
            await self._rules.set(settings)

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        async with self._db.asked():
            await self._nodes.join(node, specs)

    async def describe(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        async with self._db.asked():
            await self._nodes.describe(node, specs)

    async def list_specs(self) -> list[StoredSpec]:
        return await self._db.ask(reader.list_specs)

    async def leave(self, incarnation: str) -> None:
        async with self._db.asked():
            await self._nodes.leave(incarnation)

    async def drain(self, incarnation: str, *, on: bool = True, audit: AuditEntry | None = None) -> None:
        async with self._db.asked():
            await self._nodes.drain(incarnation, on, audit)

    async def dead_nodes(self) -> list[str]:
        async with self._db.asked():
            return await self._nodes.dead_nodes()

    async def rescue(self, incarnation: str) -> list[str]:
        async with self._db.asked():
            return await self._nodes.rescue(incarnation)

    def lease(self, incarnation: str) -> PostgresLease:
        return PostgresLease(self.url, incarnation, lease_s=self._lease_s)

    async def find_end(self, n: int, *, failed: bool | None = None) -> datetime | None:
        return await self._db.ask(lambda conn: reader.find_end(conn, n, failed))

    async def prune(
        self,
        *,
        finished_before: datetime,
        limit: int = 500,
        failed: bool | None = None,
        audit: AuditEntry | None = None,
    ) -> int:
        async with self._db.asked():
            age = self._clock.now() - finished_before
            sql, entry = "SELECT taskyard.prune_1($1, $2, $3, $4, $5)", encode_entry(audit)
            row = await self._db.write(sql, finished_before, age, limit, failed, entry)
            pruned: int = row[0]
            return pruned

    async def put_audit(self, entry: AuditEntry) -> None:
        async with self._db.asked():
            await self._db.write(PUT_AUDIT, encode_entry(entry))

    async def list_audit(
        self, where: AuditFilter = ALL_ENTRIES, *, before_id: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        return await self._db.ask(partial(list_audit, where=where, before_id=before_id, limit=limit))

    async def prune_audit(self, before: datetime, *, limit: int = 500) -> int:
        async with self._db.asked():
            row = await self._db.write(PRUNE_AUDIT, before, self._clock.now() - before, limit)
            pruned: int = row[0]
            return pruned

    # --- reading ------------------------------------------------------------------------------------------------------

    async def signals(self, node: str) -> Signals:
        return await self._db.ask(partial(reader.signals, node=node))

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return await self._db.ask(partial(reader.outcomes, uuids=uuids))

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        await self._upkeep.tidied()  # `missed` is then the last word
        return await self._db.ask(partial(reader.events, after=after, limit=limit))

    async def find(self, uuid: str) -> TaskRecord | None:
        return await self._db.ask(partial(reader.find, uuid=uuid))

    async def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        return await self._db.ask(partial(reader.find_tasks, uuids=uuids))

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return await self._db.ask(partial(reader.list_uuids, fragment=fragment, limit=limit))

    async def list_tasks(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return await self._db.ask(partial(reader.list_tasks, where=where, before_id=before_id, limit=limit))

    async def list_ids(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 500
    ) -> list[tuple[int, str]]:
        return await self._db.ask(partial(reader.list_ids, where=where, before_id=before_id, limit=limit))

    async def list_lanes(self) -> list[str]:
        return await self._db.ask(reader.list_lanes)

    async def list_blockers(self) -> list[BlockedGroup]:
        return await self._db.ask(reader.list_blockers)

    async def list_origins(self, uuids: Sequence[str]) -> set[str]:
        return await self._db.ask(partial(reader.list_origins, uuids=uuids))

    async def list_known(self, uuids: Sequence[str]) -> set[str]:
        return await self._db.ask(partial(reader.list_known, uuids=uuids))

    async def list_attempts(self, uuid: str) -> list[Attempt]:
        return await self._db.ask(partial(reader.list_attempts, uuid=uuid))

    async def list_lines(self, uuid: str, *, token: int | None = None, limit: int = 1000) -> list[AttemptLine]:
        return await self._db.ask(partial(reader.list_lines, uuid=uuid, token=token, limit=limit))

    async def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        return await self._db.ask(partial(reader.list_artifacts, uuid=uuid))

    async def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        return await self._db.ask(partial(reader.find_artifact, uuid=uuid, token=token, name=name))

    async def scene(self, records: Sequence[TaskRecord]) -> Scene:
        now = self._clock.now()
        return await self._db.ask(partial(find_scene, records=records, now=now))

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot:
        now = self._clock.now()
        return await self._db.ask(partial(find_snapshot, queue=queue, limit=limit, now=now))

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        return await self._db.ask(partial(find_medians, consumers=consumers))

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 100) -> list[FailureGroup]:
        return await self._db.ask(lambda conn: reader.failures(conn, where, limit))

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return await self._db.ask(reader.count)

    async def count_group(self, group: str) -> dict[TaskState, int]:
        return await self._db.ask(partial(reader.count_group, group=group))

    async def nodes(self) -> list[NodeStatus]:
        return await self._db.ask(reader.nodes)

    def watch(self, heard: Callable[[News], None]) -> None:
        self._db.hints.watch(heard)
