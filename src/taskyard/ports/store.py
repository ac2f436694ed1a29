"""The store: the truth. A node holds only what it is running and what it was just handed.

About a dozen verbs. `turn` is the hot path: one transaction that settles, adds, promotes and claims. Every verb is
atomic: it happens as a whole, or raises a `StoreError` and nothing happened (`OutcomeUnknown` aside). What a verb
answers is durable when it answers, as far as the store is durable at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import msgspec

from taskyard.errors import ClaimLost, TaskyardError
from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine, LogLine, join_artifacts, join_lines
from taskyard.model.audit import ALL_ENTRIES, AuditEntry, AuditFilter
from taskyard.model.catalogue import ConsumerSpec, StoredSpec
from taskyard.model.command import Command
from taskyard.model.event import EventPage
from taskyard.model.execution import Progress
from taskyard.model.failures import FailureGroup
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node, NodeStatus
from taskyard.model.notes import Note
from taskyard.model.queue import QueueCommand, QueueSettings, QueueStatus
from taskyard.model.queue_order import QueueSnapshot
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Claim, Dedupe, Outcome, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.why import Scene

ATTEMPTS_KEPT = 100
"""Runs kept of one task, the latest: a task that postpones itself for ever must not grow for ever."""

PROMOTE_AT_MOST = 1000
"""Tasks a turn promotes at most, so that a burst of due tasks cannot hold the store for long."""


class News(IntEnum):
    """What another process has done. Each of these says those before it as well."""

    ADDED = 1
    """There are new tasks; nothing else has happened."""
    CHANGED = 2
    NODES = 3
    """A node may have come or gone."""


class Signals(msgspec.Struct, frozen=True):
    """What others want of a node: the tasks running on it that are to be canceled, those of them by force, and that it
    takes no new ones."""

    cancels: list[str]
    is_draining: bool = False
    forced: tuple[str, ...] = ()


NOBODY: Mapping[str, Sequence[str]] = MappingProxyType({})


class Add(msgspec.Struct, frozen=True, gc=False):
    """One caller's tasks: queued in the order given, all or nothing. `parent` is the run that submits them, if any:
    when its claim is lost, nothing is added.

    `after` names, by the uuid of a task, those that it waits for: tasks of the store, or of the same add. `window_s` is
    for how long from now on the tasks stand for their work, where their scope is a window. A task of a quarantined
    account keeps all of them out, or, with `leaves_out`, is left out itself."""

    records: Sequence[TaskRecord]
    dedupe: Dedupe = Dedupe.ALLOW
    parent: Claim | None = None
    after: Mapping[str, Sequence[str]] = NOBODY
    window_s: float | None = None
    leaves_out: bool = False


class Added(msgspec.Struct, frozen=True, gc=False):
    """The task that now stands for what was asked; `is_new` is false when it was merged into one that did before. If
    that one does so for a window, `until` is when it ends. `uuid` is empty for a task that was left out."""

    uuid: str
    is_new: bool = True
    until: datetime | None = None


class Report(msgspec.Struct, frozen=True, gc=False):
    """What a run says of itself while it runs; what is None stays as it was. Fenced like a settle, but never worth an
    error. `checkpoint` is JSON text for the task's next run. `lines` and `artifacts` are added to those of the attempt;
    an artifact replaces one of the same name. The store keeps the latest `LINES_KEPT` lines of an attempt. After a turn
    that went unanswered the same lines may come again: within an attempt `LogLine.at` tells them apart, and a line that
    is there already is left as it is. `worker_pid` is the process that runs the attempt, if that is not the node's own;
    a settle with another one wins."""

    claim: Claim
    progress: Progress | None = None
    note: Note | None = None
    checkpoint: str | None = None
    lines: tuple[LogLine, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    worker_pid: int | None = None

    def after(self, earlier: Report) -> Report:
        """Both in one: the later says more."""
        return Report(
            self.claim,
            earlier.progress if self.progress is None else self.progress,
            earlier.note if self.note is None else self.note,
            earlier.checkpoint if self.checkpoint is None else self.checkpoint,
            join_lines(earlier.lines, self.lines) if earlier.lines and self.lines else earlier.lines or self.lines,
            join_artifacts(earlier.artifacts, self.artifacts),
            earlier.worker_pid if self.worker_pid is None else self.worker_pid,
        )


class Turned(msgspec.Struct, frozen=True):
    """What a turn did, in the order it was asked: per settle None or `ClaimLost`, per add its tasks or the error that
    kept all of them out, the claims (first to start first), and when the next waiting task is due. `ended` are tasks
    that ended by it without having run: replaced by an add, or waiting for one that did not complete."""

    settled: list[ClaimLost | None]
    added: list[list[Added] | TaskyardError]
    claims: list[Claim]
    next_due: datetime | None
    ended: list[str] = []


class Applied(msgspec.Struct, frozen=True):
    """The record after a command, or why it was refused."""

    uuid: str
    record: TaskRecord | None = None
    refused: TaskyardError | None = None


class BlockedGroup(msgspec.Struct, frozen=True):
    """The tasks of one consumer that one blocker keeps from starting: how many, and the uuid of the oldest."""

    key: str
    consumer: str
    count: int
    first: str


@runtime_checkable
class Store(Protocol):
    """Any number of nodes may use one store at a time, unless a store says that it lives in one process."""

    async def open(self) -> None:
        """Make the store ready, migrating it if needed. Opening twice is an error of the caller."""
        ...

    async def close(self) -> None:
        """Finish what was asked and let go. A node that has not left keeps its tasks until its process ends."""
        ...

    async def set_queue(self, settings: QueueSettings) -> None:
        """Create the queue or change its rules, for every node, from the next turn on. What people have said about it
        stays as it is."""
        ...

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = None
    ) -> QueueStatus:
        """Carry out what somebody asks of a whole queue, for every node, from the next turn on, and remember who, when
        and why; the queue need not exist yet. A word that changes nothing leaves no event. A queue that is stopping is
        paused by the very transaction in which the last of its tasks ends."""
        ...

    async def queues(self) -> list[QueueStatus]:
        """Every queue that has rules, tasks, or something said about it, by name. `oldest_due_at` is the earliest due
        time among those that are first of their lane, by place, and that no key holds back."""
        ...

    async def join(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        """Make the node known and alive. From here until `leave` or the end of its process it may hold claims. `specs`
        are the specifications that `node.specs` names."""
        ...

    async def describe(self, node: Node, specs: Sequence[ConsumerSpec] = ()) -> None:
        """What a node that has joined says of itself from now on; what was asked of it stays. If it is not, or no
        longer, among the nodes, nothing happens."""
        ...

    async def list_specs(self) -> list[StoredSpec]:
        """The specifications of consumers, by name, the latest first. Equal ones of several nodes are stored once. One
        is kept while a node has it. Of a consumer that no node has, the last one is kept for `SPEC_KEPT`. What is to be
        forgotten is gone after the next `join`, `describe`, `leave` or `rescue`."""
        ...

    async def leave(self, incarnation: str) -> None:
        """The node holds no claims any more and is forgotten."""
        ...

    async def nodes(self) -> list[NodeStatus]:
        """The nodes that have joined and not left, dead ones included until they are rescued."""
        ...

    async def drain(self, incarnation: str, *, on: bool = True, audit: AuditEntry | None = None) -> None:
        """Ask the node to take no new tasks, or take that back; `UnknownNode` if it is not among the nodes. It hears of
        it through `signals`, as soon as of a cancel. A node that joins is asked nothing."""
        ...

    async def dead_nodes(self) -> list[str]:
        """Those of them that are certainly dead. Never a false verdict; never the caller's own nodes."""
        ...

    async def rescue(self, incarnation: str) -> list[str]:
        """Take every task of a dead node back: each is interrupted, then queued at the head (at most `auto_recover`
        times), failed, or canceled if that was asked. Its claims are void from here on; the node is forgotten. Returns
        the tasks; a second call returns none."""
        ...

    async def turn(
        self,
        node: str,
        *,
        settles: Sequence[tuple[Claim, Move]] = (),
        adds: Sequence[Add] = (),
        reports: Sequence[Report] = (),
        demand: Demand | None = None,
    ) -> Turned:
        """One transaction, in this order: settle, report, add, promote what is due (at most `PROMOTE_AT_MOST`, by due
        time, then by age), claim.

        A task that waits for others is blocked until each of them has completed, and holds up nobody, then takes the
        place it has had since it was added; if one of them ends otherwise, it is failed, skipped or goes on, as its
        `on_failure` says, and so are those that wait for it. Whoever is waited for and has ended already counts at
        once. The end of one task is told to about a thousand that wait for it; `next_due` is now while others are still
        to be told, and every turn goes on with them. An add that waits for an unknown task is `UnknownTask`, for itself
        `DependencyCycle`.

        A slot is held until its task starts, until it has ended, or, whatever becomes of the task, for the window. With
        the scope `key_idle` it is held until the task has ended, and the oldest task that runs with the same key in the
        same queue is a holder as well, after the one of the slot, or before it for a task that is to replace it. Who
        comes later is merged into the holder, refused (`DuplicateTask`), or replaces it: the holder is canceled, unless
        it runs or has ended, which is `DuplicateTask` as well. Who is refused or merged is told when the window of
        the holder ends, if that has one. A task with the scope `key_idle` whose key is quarantined with its consumer,
        in the pool of the same name as its queue, is `AccountQuarantined`, whatever the rule for duplicates is.

        A settle is written only if its task still runs under the claim's attempt and token; otherwise it is `ClaimLost`
        and changes nothing. An add that fails leaves the other adds alone. A claim goes to the queue whose first
        startable task has the smallest (priority, position) over all lanes of the demand, and there to the task that
        the queue's order says, within the demand, the queue's concurrency and the key's limit; a queue that is not
        running gives none. It starts attempt + 1 under a token larger than every one before.

        Two turns of one node may be on their way at the same time: each is carried out as if it were alone."""
        ...

    async def preview(self, demand: Demand) -> list[TaskRecord]:
        """The tasks that a turn with this demand would claim now, first to start first. Nothing is changed: what is due
        is not promoted for it."""
        ...

    async def list_lanes(self) -> list[str]:
        """The lanes that may have tasks to start, over all queues (`lane_of`), each once. A lane that has none any more
        may still be among them."""
        ...

    async def list_blockers(self) -> list[BlockedGroup]:
        """What tasks are blocked by, apart from other tasks, by key and consumer."""
        ...

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        """Decide and carry out `command` for each task, atomically each, some hundreds in a transaction. `by` is who
        asks. An unknown task is `UnknownTask`; one that no longer fits is `CommandRefused`; one that is not among those
        of `where`, or that others change all the time, is `ChangedMeanwhile`. A failed task that is sent again takes
        its slot again, or is `SlotTaken`, which says when the window of the holder ends, if that has one; it waits
        again for those of its dependencies that have not completed, or is `DependencyLost` if one of them never will,
        and its error then names that one."""
        ...

    async def signals(self, node: str) -> Signals:
        """What was asked of `node`: cancels of tasks that run on it, and draining. Nothing, if nobody knows it."""
        ...

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        """Where each task stands, in the order asked; None for a task that is not in the store."""
        ...

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        """What happened after event number `after`, each number once, in an order in which it may have happened: what
        could know of another event comes behind it, and so do the later ones of a task, and of a queue with a limit.
        The ring keeps a bounded number; `missed` tells a reader that came too late, or with a number that this store
        has not come to: it was begun anew, or restored, and what happened since is unknown to that reader. `after=-1`
        answers only with where the ring stands now."""
        ...

    async def find(self, uuid: str) -> TaskRecord | None: ...

    async def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        """Those of these tasks that are in the store, by id; in one query, however many they are."""
        ...

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        """The ids, at most `limit`, that begin or end with `fragment`: what a person copies or types of one."""
        ...

    async def list_tasks(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        """Newest first, at most `limit`; go on with `before_id` of the last one seen. It tells what came of a turn of
        this process whose outcome is unknown: that turn changes nothing any more."""
        ...

    async def list_ids(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = 500
    ) -> list[tuple[int, str]]:
        """The same, but only their ids and uuids: for who wants to do something with many."""
        ...

    async def list_origins(self, uuids: Sequence[str]) -> set[str]:
        """Those of these tasks that others were made of (`origin`), as far as the others are still kept."""
        ...

    async def list_known(self, uuids: Sequence[str]) -> set[str]:
        """Those of these tasks that are in the store. Reads no more of them than their ids."""
        ...

    async def list_attempts(self, uuid: str) -> list[Attempt]:
        """The attempts of a task in order, the latest `ATTEMPTS_KEPT`. An attempt that runs is the last one: its state
        is running and its `finished_at` is None. An older attempt is forgotten with its lines and artifacts."""
        ...

    async def list_lines(self, uuid: str, *, token: int | None = None, limit: int = 1000) -> list[AttemptLine]:
        """The latest `limit` log lines of a task, oldest first: by attempt, then by time. `token` asks for those of one
        attempt. No lines if the task is not in the store."""
        ...

    async def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        """The artifacts of a task, by attempt and name, without their data."""
        ...

    async def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        """The artifact of this name that this attempt of the task has made, with its data if that is in the store."""
        ...

    async def scene(self, records: Sequence[TaskRecord]) -> Scene:
        """What stands around these tasks, so that `explain_wait` can say why each of them waits: read in at most six
        queries, however many they are. Nodes that are certainly dead, or were silent for their lease, are not among
        those that live; they and those that have just fallen silent are told apart. It may be a little younger than the
        records."""
        ...

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot:
        """What a forecast of this queue starts from, `limit` tasks of each part of it. Rows and queries are bounded,
        however many tasks wait; a queue that nobody has used yet is empty. What is read may change between two queries:
        the snapshot is of about one moment."""
        ...

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        """How long a run of each of these consumers takes: the median of the `RUNS_COUNTED` latest completed tasks, of
        their last attempts, among the `RUNS_READ` tasks of the store that finished last. For consumers with fewer than
        `RUNS_NEEDED` of them, `RUNS_SEARCHED` tasks are read; those with too few there are left out."""
        ...

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 100) -> list[FailureGroup]:
        """The failed tasks that match, by class of error, by source, and those in quarantine apart: the largest groups
        first, at most `limit`."""
        ...

    async def count(self) -> dict[tuple[str, TaskState], int]:
        """How many tasks each (queue, state) holds, exactly, without counting them."""
        ...

    async def count_group(self, group: str) -> dict[TaskState, int]:
        """How many tasks of the group are in each state, its summary aside."""
        ...

    async def find_end(self, n: int, *, failed: bool | None = None) -> datetime | None:
        """When the `n`th ended, counted from the one that ended last; None if there are not so many. `failed` asks for
        those that failed, or for the others alone."""
        ...

    async def prune(
        self,
        *,
        finished_before: datetime,
        limit: int = 500,
        failed: bool | None = None,
        audit: AuditEntry | None = None,
    ) -> int:
        """Forget at most `limit` tasks that ended before then, with their attempts, log lines and artifacts, oldest
        first; how many they were. Files of artifacts are left alone: they are on the machines of the nodes. Where
        several machines share a store, none that is younger than that by the clock of its server. None that one which
        has not ended waits, or has waited, for. Slots whose window is over are forgotten with them. `failed`
        means those that failed, or the others alone."""
        ...

    async def put_audit(self, entry: AuditEntry) -> None:
        """Write an entry with these counts, or replace that of the same call. Every verb with an argument `audit`
        writes that entry in the transaction that changes something, and adds to its counts if it is there already; a
        verb that changes nothing writes none, unless the entry is not finished: then it is of a command for many."""
        ...

    async def list_audit(
        self, where: AuditFilter = ALL_ENTRIES, *, before_id: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """The entries that match, newest first, at most `limit`; go on with `before_id` of the last one seen."""
        ...

    async def prune_audit(self, before: datetime, *, limit: int = 500) -> int:
        """Forget at most `limit` entries of calls that began before then, oldest first; how many they were. Where
        several machines share a store, none that is younger than that by the clock of its server."""
        ...

    def watch(self, heard: Callable[[News], None]) -> None:
        """Call `heard` on this event loop soon after another process has committed. A hint may be spurious, late (at
        most about a second), or say more than has happened; never is it missing. That a node has come or gone is told
        where the store can tell; whoever looks for dead nodes looks now and then all the same."""
        ...


@runtime_checkable
class PromptStore(Protocol):
    """A store that never has to wait may answer on the spot, without a trip through the event loop."""

    def add_now(self, add: Add) -> list[Added] | TaskyardError:
        """What `turn` does with one add and nothing else; what is due is promoted by the next turn."""
        ...

    def outcome_now(self, uuid: str) -> Outcome | None:
        """What `outcomes` says of one task."""
        ...


@runtime_checkable
class TransactionalStore(Protocol):
    """A store in a database that a user may have transactions of his own in."""

    async def add_within(self, connection: object, add: Add) -> list[Added]:
        """Store the tasks inside of the transaction that is open on the user's `connection`: they exist from its commit
        on, and never if it is not committed. The next turn of any node promotes them. What keeps the tasks out is
        raised, as a turn would answer it, and leaves the transaction as it was; `UnusableConnection` if the connection
        cannot carry them. A task that is pending and merged into may end before the transaction does. `SubmitPending`,
        at once, while another transaction that has not ended submits the same work."""
        ...


BEATS_PER_LEASE = 5
"""Two beats may be lost, and one be late, before anybody gives the node up."""


class Lease(Protocol):
    """A node's word that it lives, given again and again. It is used by one thread, on an event loop of that thread's
    own, over a connection of its own: neither a busy event loop nor a store at work may hold it up."""

    lease_s: float
    """Other nodes take over what this one runs when they have not seen it beat for so long, by their own clocks."""

    async def open(self) -> None:
        """Before the first beat, and again after `close`."""
        ...

    async def beat(self) -> bool:
        """Say it once more. False: the node was given up or has left, its claims are void, and no beat helps. Whether
        it was heard is unknown when a `StoreError` is raised."""
        ...

    async def close(self) -> None:
        """Let go of the connection. No error if it is not open."""
        ...


@runtime_checkable
class LeasedStore(Protocol):
    """A store that can tell a living node from a dead one only by its beats. A node that joins one must beat."""

    def lease(self, incarnation: str) -> Lease:
        """That of a node that joins here."""
        ...


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a store's tables, 0 if there are none yet; the newest that this program knows; and the names of
    the migrations in between, in order, and of the bundle if the store has an older one."""

    version: int
    newest: int
    pending: tuple[str, ...] = ()


@runtime_checkable
class MigratingStore(Protocol):
    """A store with tables that change from version to version. Both verbs are for a store that is not open: opening one
    brings it up to date as well."""

    async def schema(self) -> Schema:
        """Look, and change nothing. `StoreTooNew` if a newer program has been here."""
        ...

    async def migrate(self) -> Schema:
        """Bring it up to date, in one transaction, once however many ask at a time; what was found before.
        `StoreTooNew` if a newer program has been here; nothing is changed then."""
        ...
