"""The port over `MemoryCore`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from types import MethodType
from weakref import WeakMethod

from taskyard.errors import TaskyardError
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
from taskyard.ports.store import Add, Added, Applied, BlockedGroup, News, Report, Signals, Turned
from taskyard.stores.memory.core import MemoryCore
from taskyard.stores.memory.devices import DeviceVerbs
from taskyard.stores.memory.schedules import ScheduleVerbs


class MemoryStore(ScheduleVerbs, DeviceVerbs):
    """It lives in one process and one event loop; other processes never see it, but several
    yards of this loop may share it and hear each other."""

    def __init__(self, clock: Clock, *, keep_ended: int | None = None) -> None:
        self._core = MemoryCore(clock, keep_ended=keep_ended)
        self._opened = 0
        self._listeners: list[Callable[[], Callable[[News], None] | None]] = []
        self._told = 0
        self._is_telling = False

    async def open(self) -> None:
        self._opened += 1

    async def close(self) -> None:
        self._opened -= 1
        if self._opened <= 0:
            self._listeners.clear()
            self._is_telling = False  # the loop may end before it could tell; the next one starts anew

    async def set_queue(self, settings: QueueSettings) -> None:
        self._core.set_queue(settings)
        self._tell()

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = None
    ) -> QueueStatus:
        answer = self._core.control(queue, command, by, audit)
        self._tell_of_events()
        return answer

    async def queues(self) -> list[QueueStatus]:
        return self._core.queues()

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        self._core.join(node, specs)

    async def describe(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        self._core.describe(node, specs)

    async def list_specs(self) -> list[StoredSpec]:
        return self._core.list_specs()

    async def leave(self, incarnation: str) -> None:
        self._core.leave(incarnation)

    async def nodes(self) -> list[NodeStatus]:
        return self._core.list_nodes()

    async def drain(self, incarnation: str, *, on: bool = True, audit: AuditEntry | None = None) -> None:
        self._core.drain(incarnation, on=on, audit=audit)
        self._tell()

    async def dead_nodes(self) -> list[str]:
        return []  # every node is in this process, and it is alive

    async def rescue(self, incarnation: str) -> list[str]:
        answer = self._core.rescue(incarnation)
        self._tell_of_events()
        return answer

    async def turn(
        self,
        node: str,
        *,
        settles: Sequence[tuple[Claim, Move]] = (),
        adds: Sequence[Add] = (),
        reports: Sequence[Report] = (),
        demand: Demand | None = None,
    ) -> Turned:
        answer = self._core.turn(node, settles, adds, reports, demand)
        self._tell_of_events()
        return answer

    def add_now(self, add: Add) -> list[Added] | TaskyardError:
        answer = self._core.add(add)
        self._tell_of_events()
        return answer

    def outcome_now(self, uuid: str) -> Outcome | None:
        return self._core.outcome(uuid)

    async def preview(self, demand: Demand) -> list[TaskRecord]:
        return self._core.preview(demand)

    async def list_lanes(self) -> list[str]:
        return self._core.list_lanes()

    async def list_blockers(self) -> list[BlockedGroup]:
        return self._core.list_blockers()

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        answer = self._core.apply(uuids, command, by, where, audit)
        self._tell_of_events()
        return answer

    async def signals(self, node: str) -> Signals:
        return self._core.signals(node)

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return self._core.outcomes(uuids)

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        return self._core.events(after, limit)

    async def find(self, uuid: str) -> TaskRecord | None:
        return self._core.find(uuid)

    async def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        return self._core.find_tasks(uuids)

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return self._core.list_uuids(fragment, limit)

    async def list_tasks(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return self._core.list_tasks(where, before_id, limit)

    async def list_ids(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 500
    ) -> list[tuple[int, str]]:
        return self._core.list_ids(where, before_id, limit)

    async def list_origins(self, uuids: Sequence[str]) -> set[str]:
        return self._core.list_origins(uuids)

    async def list_known(self, uuids: Sequence[str]) -> set[str]:
        return self._core.list_known(uuids)

    async def list_attempts(self, uuid: str) -> list[Attempt]:
        return self._core.list_attempts(uuid)

    async def list_lines(self, uuid: str, *, token: int | None = None, limit: int = 1000) -> list[AttemptLine]:
        return self._core.list_lines(uuid, token, limit)

    async def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        return self._core.list_artifacts(uuid)

    async def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        return self._core.find_artifact(uuid, token, name)

    async def scene(self, records: Sequence[TaskRecord]) -> Scene:
        return self._core.scene(records)

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot:
        return self._core.queue_snapshot(queue, limit)

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        return self._core.median_run_s(consumers)

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 100) -> list[FailureGroup]:
        return self._core.failures(where, limit)

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return self._core.count()

    async def count_group(self, group: str) -> dict[TaskState, int]:
        return self._core.count_group(group)

    async def find_end(self, n: int, *, failed: bool | None = None) -> datetime | None:
        return self._core.find_end(n, failed)

    async def prune(
        self,
        *,
        finished_before: datetime,
        limit: int = 500,
        failed: bool | None = None,
        audit: AuditEntry | None = None,
    ) -> int:
        return self._core.prune(finished_before, limit, failed, audit)

    async def put_audit(self, entry: AuditEntry) -> None:
        self._core.audit.put(entry)

    async def list_audit(
        self, where: AuditFilter = ALL_ENTRIES, *, before_id: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        return self._core.audit.list_all(where, before_id, limit)

    async def prune_audit(self, before: datetime, *, limit: int = 500) -> int:
        return self._core.audit.prune(before, limit)

    # --- telling the other yards ------------------------------------------------------------------------------------

    def watch(self, heard: Callable[[News], None]) -> None:
        """Weakly: nobody says when an engine stops listening, and one that has stopped must not stay for us."""
        self._listeners.append(WeakMethod(heard) if isinstance(heard, MethodType) else lambda: heard)

    def _tell_of_events(self) -> None:
        """Only what leaves an event is told: the turn that a hint leads to writes nothing, so hints do not echo. Who
        wrote is not known here, so it is told as well; but a yard that is alone is spared its own echo."""
        if len(self._listeners) > 1 and self._core.event_seq != self._told:
            self._told = self._core.event_seq
            self._tell()

    def _tell(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._is_telling = False
        alive = [(ref, heard) for ref in self._listeners if (heard := ref()) is not None]
        self._listeners = [ref for ref, _ in alive]
        for _, heard in alive:
            heard(News.CHANGED)
