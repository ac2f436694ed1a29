"""The store as a simulated node sees it: every verb is a call over its line, and what it shows goes into a history."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from taskyard.errors import OutcomeUnknown, StoreError, StoreUnavailable, TaskyardError
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
from taskyard.ports.store import Add, Added, Applied, BlockedGroup, Report, Signals, Turned
from taskyard.testing.ledger import Entry, What
from taskyard.testing.simulation.history import Fate, Kind, Op
from taskyard.testing.simulation.loop import PROCESS
from taskyard.testing.simulation.network import LEASE_S, Line, Network


class RemoteStore(Line):
    def __init__(self, network: Network, name: str) -> None:
        super().__init__(network, name)
        self._core, self._loop, self._history = network.core, network.loop, network.history
        self._own: set[str] = set()

    def tell(self, answer: object) -> str:
        return _told(answer)

    # --- nodes --------------------------------------------------------------------------------------------------------

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        self._own.add(node.incarnation)
        self.network.processes[node.incarnation] = PROCESS.get()

        def effect() -> None:
            self._core.join(node, specs)
            self.network.beats[node.incarnation] = self._loop.time()

        await self.ask(f"join {node.incarnation}", effect)

    async def describe(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        await self.ask(f"describe {node.incarnation}", lambda: self._core.describe(node, specs))

    async def list_specs(self) -> list[StoredSpec]:
        return await self.ask("list_specs", self._core.list_specs)

    def lease(self, incarnation: str) -> SimulatedLease:
        return SimulatedLease(self, incarnation)

    async def drain(self, incarnation: str, *, on: bool = True, audit: AuditEntry | None = None) -> None:
        def effect() -> None:
            self._core.drain(incarnation, on=on, audit=audit)
            self.network.tell_all()

        await self.ask(f"drain {incarnation} {on}", effect)

    async def leave(self, incarnation: str) -> None:
        def effect() -> None:
            self.network.beats.pop(incarnation, None)
            self._core.leave(incarnation)

        await self.ask("leave", effect)

    async def dead_nodes(self) -> list[str]:
        beats = self.network.beats
        over, own = self.network.is_over, self._own
        dead = await self.ask("dead_nodes", lambda: [node for node in beats if over(node)], is_odd=True)
        return [node for node in dead if node not in own]

    async def rescue(self, incarnation: str) -> list[str]:
        history = self._history
        asked = history.ask(Op(kind=Kind.RESCUE, task="", asked=history.place(), node=incarnation))

        def effect() -> list[str]:
            if incarnation not in self._own and not self.network.is_over(incarnation):
                return []  # it has been heard again, or others were faster
            self._give_up(incarnation)
            return self._core.rescue(incarnation)

        try:
            uuids = await self.ask(f"rescue {incarnation}", effect)
        except OutcomeUnknown:
            raise
        except StoreError:
            history.answer(asked, Fate.NEVER)
            raise
        history.answer(asked, Fate.NEVER)  # as such; it is done to each of these
        for uuid in uuids:
            op = Op(kind=Kind.RESCUE, task=uuid, asked=asked.asked, node=incarnation)
            history.answer(history.ask(op), Fate.DONE)
        return uuids

    def _give_up(self, incarnation: str) -> None:
        """A node that could run all the time has ended its runs by now: only of one that could not the ledger is told
        that what it runs is stale."""
        history, process = self._history, self.network.processes.get(incarnation)
        self.network.beats.pop(incarnation, None)
        if incarnation not in history.expired:
            history.expired[incarnation] = history.place()
            if process is None or process.was_frozen:
                entry = Entry(what=What.EXPIRED, pid=pid_of(incarnation), at_mono=self._loop.time())
                history.entries.append(entry)

    # --- the hot path -------------------------------------------------------------------------------------------------

    async def turn(
        self,
        node: str,
        *,
        settles: Sequence[tuple[Claim, Move]] = (),
        adds: Sequence[Add] = (),
        reports: Sequence[Report] = (),
        demand: Demand | None = None,
    ) -> Turned:
        asked, ops = self._history.place(), self._ask_settles(settles)

        def effect() -> Turned:
            # From `join` until it leaves or is given up a node may hold claims; not before, and not after.
            room = demand if node in self.network.beats else None
            return self._core.turn(node, settles, adds, reports, room)

        verb = f"turn{_settling(settles)}{f' adds {len(adds)}' if adds else ''}{' claims' if demand else ''}"
        try:
            # Never a settle alone: one that fails time and again is given up, and its task waits for its node's end.
            turned = await self.ask(verb, effect, is_odd=bool(adds or demand))
        except OutcomeUnknown:
            raise
        except (StoreError, ZeroDivisionError):
            for op in ops:
                self._history.answer(op, Fate.NEVER)
            raise
        for op, lost in zip(ops, turned.settled, strict=True):
            self._history.answer(op, Fate.DONE if lost is None else Fate.REFUSED)
        for claim in turned.claims:
            op = Op(kind=Kind.CLAIM, task=claim.uuid, asked=asked, node=node, token=claim.token, attempt=claim.attempt)
            self._history.answer(self._history.ask(op), Fate.DONE)
        return turned

    def _ask_settles(self, settles: Sequence[tuple[Claim, Move]]) -> list[Op]:
        return [
            self._history.ask(
                Op(
                    kind=Kind.SETTLE,
                    task=claim.uuid,
                    asked=self._history.place(),
                    asked_mono=self._loop.time(),
                    token=claim.token,
                    state=move.state,
                    due_at=move.due_at,
                    retried=move.retried,
                )
            )
            for claim, move in settles
        ]

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def set_queue(self, settings: QueueSettings) -> None:
        await self.ask("set_queue", lambda: self._core.set_queue(settings))

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = None
    ) -> QueueStatus:
        return await self.ask(type(command).__name__, lambda: self._core.control(queue, command, by, audit))

    async def queues(self) -> list[QueueStatus]:
        return await self.ask("queues", self._core.queues)

    async def nodes(self) -> list[NodeStatus]:
        return await self.ask("nodes", self._core.list_nodes)

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        verb = f"{type(command).__name__} {','.join(uuids)}"
        return await self.ask(verb, lambda: self._core.apply(uuids, command, by, where, audit))

    async def preview(self, demand: Demand) -> list[TaskRecord]:
        return await self.ask("preview", lambda: self._core.preview(demand), is_odd=True)

    async def list_lanes(self) -> list[str]:
        return await self.ask("list_lanes", self._core.list_lanes, is_odd=True)

    async def list_blockers(self) -> list[BlockedGroup]:
        return await self.ask("list_blockers", self._core.list_blockers, is_odd=True)

    async def signals(self, node: str) -> Signals:
        return await self.ask("signals", lambda: self._core.signals(node), is_odd=True)

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return await self.ask("outcomes", lambda: self._core.outcomes(uuids), is_odd=True)

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        return await self.ask("events", lambda: self._core.events(after, limit), is_odd=True)

    async def find(self, uuid: str) -> TaskRecord | None:
        return await self.ask("find", lambda: self._core.find(uuid))

    async def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        return await self.ask("find_tasks", lambda: self._core.find_tasks(uuids))

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return await self.ask("list_uuids", lambda: self._core.list_uuids(fragment, limit))

    async def list_tasks(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return await self.ask("list_tasks", lambda: self._core.list_tasks(where, before_id, limit))

    async def list_ids(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 500
    ) -> list[tuple[int, str]]:
        return await self.ask("list_ids", lambda: self._core.list_ids(where, before_id, limit))

    async def list_origins(self, uuids: Sequence[str]) -> set[str]:
        return await self.ask("list_origins", lambda: self._core.list_origins(uuids))

    async def list_known(self, uuids: Sequence[str]) -> set[str]:
        return await self.ask("list_known", lambda: self._core.list_known(uuids))

    async def list_attempts(self, uuid: str) -> list[Attempt]:
        return await self.ask("list_attempts", lambda: self._core.list_attempts(uuid))

    async def list_lines(self, uuid: str, *, token: int | None = None, limit: int = 1000) -> list[AttemptLine]:
        return await self.ask("list_lines", lambda: self._core.list_lines(uuid, token, limit))

    async def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        return await self.ask("list_artifacts", lambda: self._core.list_artifacts(uuid))

    async def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        return await self.ask("find_artifact", lambda: self._core.find_artifact(uuid, token, name))

    async def scene(self, records: Sequence[TaskRecord]) -> Scene:
        return await self.ask("scene", lambda: self._core.scene(records))

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot:
        return await self.ask("queue_snapshot", lambda: self._core.queue_snapshot(queue, limit))

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        return await self.ask("median_run_s", lambda: self._core.median_run_s(consumers))

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 100) -> list[FailureGroup]:
        return await self.ask("failures", lambda: self._core.failures(where, limit))

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return await self.ask("count", self._core.count)

    async def count_group(self, group: str) -> dict[TaskState, int]:
        return await self.ask("count_group", lambda: self._core.count_group(group))

    async def find_end(self, n: int, *, failed: bool | None = None) -> datetime | None:
        return await self.ask("find_end", lambda: self._core.find_end(n, failed))

    async def prune(
        self,
        *,
        finished_before: datetime,
        limit: int = 500,
        failed: bool | None = None,
        audit: AuditEntry | None = None,
    ) -> int:
        return await self.ask("prune", lambda: self._core.prune(finished_before, limit, failed, audit))

    async def put_audit(self, entry: AuditEntry) -> None:
        await self.ask("put_audit", lambda: self._core.audit.put(entry))

    async def list_audit(
        self, where: AuditFilter = ALL_ENTRIES, *, before_id: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        return await self.ask("list_audit", lambda: self._core.audit.list_all(where, before_id, limit))

    async def prune_audit(self, before: datetime, *, limit: int = 500) -> int:
        return await self.ask("prune_audit", lambda: self._core.audit.prune(before, limit))


class SimulatedLease:
    """Beats over the line of its node."""

    lease_s = LEASE_S

    def __init__(self, remote: RemoteStore, incarnation: str) -> None:
        self._remote, self._incarnation = remote, incarnation

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def beat(self) -> bool:
        network = self._remote.network

        def effect() -> bool:
            if self._incarnation not in network.beats:
                return False
            network.beats[self._incarnation] = network.loop.time()
            return True

        return await self._remote.ask("beat", effect)


class PromptRemote(RemoteStore):
    """A store that is at hand: submits and outcomes are answered on the spot. It may still refuse them."""

    def add_now(self, add: Add) -> list[Added] | TaskyardError:
        if self.is_down or self.network.rng.random() < self.network.weather.refused:
            raise StoreUnavailable("the store cannot be reached")
        return self.network.carry_out(self, "add_now", lambda: self._core.add(add))

    def outcome_now(self, uuid: str) -> Outcome | None:
        return self._core.outcome(uuid)


def pid_of(incarnation: str) -> int:
    """Simulated incarnations are numbered: `node-2/7` has the number 7, whichever node it is."""
    return int(incarnation.rpartition("/")[2])


def _settling(settles: Sequence[tuple[Claim, Move]]) -> str:
    return "".join(f" {claim.uuid}/{claim.token}={move.state}" for claim, move in settles)


def _told(answer: object) -> str:
    """What of an answer is worth a line."""
    match answer:
        case Turned():
            lost = "".join("x" if one is not None else "." for one in answer.settled)
            claims = " ".join(f"{claim.uuid}/{claim.token}" for claim in answer.claims)
            added = " ".join("refused" if isinstance(one, Exception) else _told(one) for one in answer.added)
            return f"[{lost}] [{added}] [{claims}] {answer.next_due}"
        case list():
            return ",".join(_told(one) for one in answer)
        case Added():
            return answer.uuid
        case Applied():
            return f"{answer.uuid} {answer.record.state if answer.record is not None else 'refused'}"
        case Outcome() | TaskRecord():
            return f"{answer.uuid} {answer.state}"
        case EventPage():
            return f"{len(answer.events)} events to {answer.last}"
    return str(answer)
