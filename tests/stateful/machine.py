"""A Hypothesis machine that does the same random things to the memory store and to another, and compares all they hold.

The memory store is the reference; what both agree on is then held against rules that neither of them implements: only
legal moves, limits kept, nothing startable left waiting. The other, SQLite or PostgreSQL, is driven through two handles
on one store, as two processes would, and is closed and opened again at random: what one handle remembers must never be
stale.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from taskyard.errors import (
    ClaimLost,
    CommandRefused,
    DependencyCycle,
    DuplicateTask,
    InvalidInput,
    SlotTaken,
    TaskyardError,
    UnknownTask,
)
from taskyard.model import order
from taskyard.model.blocker import encode_requirements, lane_of
from taskyard.model.command import (
    Block,
    Cancel,
    Command,
    Hold,
    MoveAfter,
    MoveBefore,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
    Unblock,
)
from taskyard.model.event import TOLD_AS, Event, EventKind
from taskyard.model.execution import ErrorKind, ExecutionError, Progress
from taskyard.model.limits import Demand, Quota
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import (
    UNTOUCHED,
    Pause,
    QueueCommand,
    QueueControl,
    QueueOrder,
    QueueSettings,
    QueueState,
    Resume,
    SetConcurrency,
    StopAfterCurrent,
)
from taskyard.model.state import ENDED, HOLDS_KEY, TaskState, check_move
from taskyard.model.task import Claim, Dedupe, DedupeScope, OnFailure, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Add, Added, Report, Store, Turned
from taskyard.stores.memory import MemoryStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node

T = TypeVar("T")

QUEUES = ("default", "cpu")
QUIET = "quiet"
"""Where mostly one task comes at a time, and starts in the turn that adds it."""
SOURCES = ("fetch", "shrink", "report")
EU = encode_requirements({"role": "eu"})
LANES = (*SOURCES, *(lane_of(source, EU) for source in SOURCES[:2]))
WINDOW_S = 2.0
TOLD, GIVEN_UP = Note.remark("told"), Note(NoteCode.QUARANTINED, facts={"crashes": 3})
DELAYS = (0.0, 0.0, 0.0, -5.0, 0.5, 1.0, 3.0)
STATES = {kind: state for state, kind in TOLD_AS.items()}


class After(NamedTuple):
    """One that a task waits for, as drawn: of those before it in its batch, of all of the batch, or of the store."""

    n: int
    where: str


class Asked(NamedTuple):
    """A task to be added, as drawn. `again` uses the uuid of an earlier one."""

    queue: str
    source: str
    priority: Priority
    key: str | None
    slot: str | None
    delay_s: float
    again: bool
    bucket: str | None
    scope: DedupeScope | None
    group: str | None
    after: list[After]
    on_failure: OnFailure
    requires: str | None = None


class Pick(NamedTuple):
    """A claim, or a task, as drawn: the n-th newest of those that still count, or of all there ever were."""

    n: int
    live: bool


class Batch(NamedTuple):
    """One add, as drawn. `parent` is the run that makes it."""

    tasks: list[Asked]
    dedupe: Dedupe
    parent: Pick | None


class Ending(NamedTuple):
    """One settle, as drawn: which claim, and how its run ended."""

    claim: Pick
    how: str
    delay_s: float


def a_plain_task(queue: str, source: str, priority: Priority, key: str | None) -> Asked:
    return Asked(queue, source, priority, key, None, 0.0, False, None, None, None, [], OnFailure.FAIL)


picks = st.builds(Pick, st.integers(0, 15), st.sampled_from([True] * 4 + [False]))
afters = st.builds(After, st.integers(0, 15), st.sampled_from(["store"] * 4 + ["before"] * 4 + ["batch"]))
asked = st.builds(
    Asked,
    st.sampled_from(QUEUES),
    st.sampled_from(SOURCES),
    st.sampled_from([Priority.NORMAL, Priority.HIGH, Priority.LOW]),
    st.sampled_from([None, None, "k", "m"]),
    st.sampled_from([None, None, "s", "t"]),
    st.sampled_from(DELAYS),
    st.sampled_from([False] * 19 + [True]),
    st.sampled_from([None, "x", "y"]),
    st.sampled_from([None, *DedupeScope]),
    st.sampled_from([None, None, "g"]),
    st.just([]) | st.lists(afters, max_size=3),
    st.sampled_from(OnFailure),
    st.sampled_from([None, None, EU]),
)
plain = st.builds(
    a_plain_task,
    st.sampled_from(QUEUES),
    st.sampled_from(SOURCES),
    st.sampled_from(Priority),
    st.sampled_from([None, None, "k", "m"]),
)
batches = st.builds(
    Batch, st.lists(asked, min_size=1, max_size=3), st.sampled_from(Dedupe), st.one_of(st.none(), st.none(), picks)
)
HOW = ("completed", "failed", "crashed", "retrying", "later", "given-back", "device-lost", "devices-lost", "canceled")
endings = st.builds(Ending, picks, st.sampled_from(HOW), st.sampled_from([0.0, 1.0, 2.0]))
rooms = st.sampled_from([9, 3, 2, 1, 1, 0])
demands = st.builds(
    Demand, st.sampled_from([9, 4, 2, 1, 0]), st.dictionaries(st.sampled_from(LANES), rooms, max_size=4), rooms
)
generous = st.builds(Demand, st.sampled_from([9, 3, 2, 1]), st.just({}), st.just(9))
nodes = st.integers(0, 1)
handles = st.integers(0, 1)
commands = st.one_of(
    st.builds(Cancel, st.sampled_from(["", "not needed"])),
    st.builds(Retry, to_head=st.booleans()),
    st.builds(SetPriority, st.sampled_from(Priority)),
)
more_commands = st.one_of(
    st.builds(Cancel, st.sampled_from(["", "not needed"]), st.booleans()),
    st.builds(Hold, st.sampled_from(["", "wait"])),
    st.just(Release()),
    st.just(Release()),
    st.builds(Skip, st.sampled_from(["", "old"])),
    st.builds(StartNow, st.booleans()),
    st.builds(Block, st.just("disk"), st.sampled_from(["/a", "/b"])),
    st.builds(Unblock, st.just("disk"), st.sampled_from(["/a", "/a", "/b"])),
)
settings_of_queues = st.builds(
    QueueSettings,
    name=st.sampled_from([*QUEUES * 4, QUIET]),
    concurrency=st.sampled_from([None, 1, 2, 3]),
    per_key=st.sampled_from([1, 1, 2]),
    auto_recover=st.sampled_from([0, 1, 2]),
    order=st.sampled_from([QueueOrder.PRIORITY, QueueOrder.PRIORITY, QueueOrder.FIFO, QueueOrder.BUCKETS]),
    starve_after=st.sampled_from([None, 1, 2]),
    starve_wait_s=st.sampled_from([None, 1.0, 60.0]),
)
words = st.one_of(
    st.builds(Pause, st.sampled_from(["", "backup"])),
    *[st.just(Resume())] * 4,
    st.builds(StopAfterCurrent, st.sampled_from(["", "backup"])),
    st.builds(SetConcurrency, st.sampled_from([None, 1, 2])),
)


class StoreMachine(RuleBasedStateMachine):
    """`name` is that of the other store; a subclass may have another."""

    name = "SQLite"
    seen: ClassVar[Counter[str]] = Counter()
    """What has happened in all histories of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.clock = ManualClock()
        self.folder = tempfile.TemporaryDirectory(prefix="taskyard-")
        self.memory: Store = MemoryStore(self.clock)
        self.home: Store = self.memory
        self.handles: list[Store] = []
        self.nodes: list[str] = []
        self.queues: dict[str, QueueSettings] = {}
        self.controls: dict[str, QueueControl] = {}
        self.claims: list[tuple[Claim, Claim]] = []  # each store's own, live or stale
        self.states: dict[str, set[TaskState]] = {}  # where a task may be, by the events told so far
        self.uuids: list[str] = []
        self.known: dict[str, TaskRecord] = {}  # what the memory store held after the last step
        self.after: dict[str, list[str]] = {}  # who waits for whom, as asked
        self.ends: dict[str, set[TaskState]] = {}  # how a task has ever ended
        self.last_event = self.last_theirs = 0
        self.last_token = 0
        self.joined = self.made = self.started = 0
        self.numbers: dict[int, int] = {}  # the memory store's ids, tokens and places, and the other's

    @initialize()
    def open(self) -> None:
        self.run(self.memory.open())
        self.home = self.open_handle()  # where the nodes join and leave; it stays open
        self.handles = [self.open_handle() for _ in range(2)]
        self.nodes = [self.join(), self.join()]

    def open_handle(self) -> Store:
        # Nothing here pulls the plug, so that nothing has to be waited for.
        handle = SqliteStore(Path(self.folder.name) / "work.db", clock=self.clock, synchronous="NORMAL")
        self.run(handle.open())
        return handle

    def join(self) -> str:
        self.joined += 1
        node = a_node(f"{self.joined}")
        self.run(self.memory.join(node))
        self.run(self.home.join(node))
        return node.incarnation

    def leave(self, node: str) -> None:
        self.run(self.memory.leave(node))
        self.run(self.home.leave(node))

    def teardown(self) -> None:
        self.seen.update(tasks=len(self.uuids), runs=self.started)
        for node in self.nodes:
            self.leave(node)
        for handle in self.handles:
            self.run(handle.close())
        if self.handles:
            self.run(self.home.close())
        self.loop.close()
        self.folder.cleanup()

    def run(self, doing: Awaitable[T]) -> T:
        async def do() -> T:
            return await doing

        return self.loop.run(do())

    def both(self, handle: int, do: Callable[[Store], Awaitable[T]]) -> tuple[T, T]:
        """Do it to the memory store and to one of the handles on the other."""
        return self.run(do(self.memory)), self.run(do(self.handles[handle]))

    # --- what may happen ----------------------------------------------------------------------------------------------

    @rule(
        handle=handles,
        node=nodes,
        settles=st.lists(endings, max_size=4),
        adds=st.lists(batches, max_size=2),
        reports=st.lists(picks, max_size=2),
        demand=st.none() | demands,
    )
    def turn(
        self,
        handle: int,
        node: int,
        settles: list[Ending],
        adds: list[Batch],
        reports: list[Pick],
        demand: Demand | None,
    ) -> None:
        now = self.clock.now()
        records = [[self.record(task) for task in batch.tasks] for batch in adds]
        after = [self.waits(batch.tasks, made) for batch, made in zip(adds, records, strict=True)]
        endings = [(ending.claim, self.move(ending, now)) for ending in settles] if self.claims else []
        told = reports if self.claims else []

        def turn_of(which: int) -> Callable[[Store], Awaitable[Turned]]:
            return lambda store: store.turn(
                self.nodes[node],
                settles=[(self.claim(pick, which), move) for pick, move in endings],
                adds=[
                    Add(
                        batch_records,
                        batch.dedupe,
                        None if batch.parent is None or not self.claims else self.claim(batch.parent, which),
                        waits,
                        WINDOW_S,
                    )
                    for batch, batch_records, waits in zip(adds, records, after, strict=True)
                ],
                reports=[
                    Report(self.claim(pick, which), Progress(pick.n / 15), TOLD, str(pick.n) if pick.n % 2 else None)
                    for pick in told
                ],
                demand=demand,
            )

        one = self.run(turn_of(0)(self.memory))
        two = self.run(turn_of(1)(self.handles[handle]))
        self.took(one, two, adds=list(zip(records, after, strict=True)), demand=demand)

    def took(
        self,
        one: Turned,
        two: Turned,
        *,
        adds: list[tuple[list[TaskRecord], dict[str, list[str]]]],
        demand: Demand | None,
    ) -> None:
        """Both stores have answered the same to a turn."""
        assert [answer(lost) for lost in two.settled] == [answer(lost) for lost in one.settled]
        assert [answer(added) for added in two.added] == [answer(added) for added in one.added]
        assert [claim.uuid for claim in two.claims] == [claim.uuid for claim in one.claims]
        for mine, theirs in zip(one.claims, two.claims, strict=True):
            self.same(mine.record, theirs.record)
            assert (theirs.attempt, theirs.token) == (mine.attempt, self.number(mine.token, theirs.token))
        assert two.next_due == one.next_due
        assert sorted(two.ended) == sorted(one.ended)
        self.claims += zip(one.claims, two.claims, strict=True)
        self.started += len(one.claims)
        del self.claims[:-60]
        self.uuids += [added.uuid for adds in one.added if isinstance(adds, list) for added in adds if added.is_new]
        for answers, (made, waits) in zip(one.added, adds, strict=True):
            if isinstance(answers, list):
                new = {added.uuid for added in answers if added.is_new}
                merged = {r.uuid: added.uuid for r, added in zip(made, answers, strict=True) if not added.is_new}
                for child in new & waits.keys():
                    self.after[child] = [merged.get(parent, parent) for parent in waits[child]]
        left = self.compare()
        self.check_claims(one, left)
        self.check_nothing_startable_waits(one, demand, left)
        self.check_keys_were_idle(one, left)
        self.check_claims_waited(one)
        waiting = [r.due_at for r in left if r.state in {TaskState.SCHEDULED, TaskState.RETRYING}]
        assert one.next_due == min(waiting, default=None)

    @rule(handle=handles, node=nodes, demand=generous | demands, skipped=st.sampled_from([None, None, 0, 1, 2]))
    def what_was_previewed_starts(self, handle: int, node: int, demand: Demand, skipped: int | None) -> None:
        """A preview changes nothing; a claim of just these tasks starts those before the first that is not named."""
        self.turn(handle, node, [], [], [], None)  # what is due is queued by the claim, and may then go first
        one, two = self.both(handle, lambda store: store.preview(demand))
        assert [record.uuid for record in two] == [record.uuid for record in one]
        for mine, theirs in zip(one, two, strict=True):
            self.same(mine, theirs)
        self.compare()

        def turn_of(store: Store, records: list[TaskRecord]) -> Awaitable[Turned]:
            only = {record.id: f"emu-{n}" if n % 2 else None for n, record in enumerate(records) if n != skipped}
            return store.turn(self.nodes[node], demand=msgspec.structs.replace(demand, only=only))

        turned = self.run(turn_of(self.memory, one))
        assert len(turned.claims) == len(one) if skipped is None else len(turned.claims) <= skipped
        self.took(turned, self.run(turn_of(self.handles[handle], two)), adds=[], demand=None)

    # The same in parts, so that half of what happens is work.

    @rule(handle=handles, node=nodes, adds=st.lists(batches, min_size=1, max_size=2), demand=demands)
    def submit(self, handle: int, node: int, adds: list[Batch], demand: Demand) -> None:
        self.turn(handle, node, [], adds, [], demand)

    @precondition(lambda self: self.claims)
    @rule(handle=handles, node=nodes, settles=st.lists(endings, min_size=1, max_size=4), demand=demands)
    def work(self, handle: int, node: int, settles: list[Ending], demand: Demand) -> None:
        self.turn(handle, node, settles, [], [], demand)

    @rule(handle=handles, node=nodes, tasks=st.lists(plain, min_size=1, max_size=4), demand=generous)
    def plain_work_comes(self, handle: int, node: int, tasks: list[Asked], demand: Demand) -> None:
        self.turn(handle, node, [], [Batch(tasks, Dedupe.ALLOW, None)], [], demand)

    @rule(
        handle=handles,
        node=nodes,
        settles=st.lists(endings, max_size=2),
        source=st.sampled_from(SOURCES),
        demand=generous | demands,
    )
    def one_task_comes(self, handle: int, node: int, settles: list[Ending], source: str, demand: Demand) -> None:
        task = a_plain_task(QUIET, source, Priority.NORMAL, None)
        self.turn(handle, node, settles, [Batch([task], Dedupe.ALLOW, None)], [], demand)

    @precondition(lambda self: self.uuids)
    @rule(handle=handles, node=nodes, demand=demands)
    def a_node_has_room(self, handle: int, node: int, demand: Demand) -> None:
        self.turn(handle, node, [], [], [], demand)

    @precondition(lambda self: self.claims)
    @rule(handle=handles, node=nodes, ends=st.lists(st.sampled_from(HOW), min_size=1, max_size=4), demand=generous)
    def runs_end(self, handle: int, node: int, ends: list[str], demand: Demand) -> None:
        settles = [Ending(Pick(n, True), how, 1.0) for n, how in enumerate(ends)]
        self.turn(handle, node, settles, [], [], demand)

    @rule(seconds=st.sampled_from([1.0, 2.0, 0.5, 0.25, 60.0]), is_set=st.sampled_from([False] * 9 + [True]))
    def time_passes(self, seconds: float, is_set: bool) -> None:
        """It does, or somebody sets the clock back."""
        if is_set:
            self.clock.step(-60 * seconds)
        else:
            self.clock.advance(seconds)

    @precondition(lambda self: self.uuids)
    @rule(handle=handles, which=st.lists(picks, min_size=1, max_size=4), command=commands)
    def somebody_commands(self, handle: int, which: list[Pick], command: Command) -> None:
        uuids = [self.task(pick, command) for pick in which]
        one, two = self.both(handle, lambda store: store.apply(uuids, command))
        assert [(a.uuid, refusal(a.refused)) for a in two] == [(a.uuid, refusal(a.refused)) for a in one]
        # A task named twice, or whose key's order changed again meanwhile: the last answer is what is stored.
        if len(uuids) == 1 and one[0].record is not None and two[0].record is not None:
            self.same(one[0].record, two[0].record)
        self.compare()
        for node in self.nodes:
            asked, signaled = self.both(handle, lambda store, node=node: store.signals(node))  # type: ignore[misc]
            assert sorted(signaled.cancels) == sorted(asked.cancels)
            assert signaled.is_draining is asked.is_draining

    @precondition(lambda self: self.uuids)
    @rule(handle=handles, which=st.lists(picks, min_size=1, max_size=3), command=more_commands)
    def somebody_asks_more(self, handle: int, which: list[Pick], command: Command) -> None:
        self.somebody_commands(handle, which, command)

    @precondition(lambda self: self.uuids)
    @rule(handle=handles, which=picks, delay_s=st.sampled_from(DELAYS))
    def somebody_reschedules(self, handle: int, which: Pick, delay_s: float) -> None:
        due_at = self.clock.now() + timedelta(seconds=delay_s)
        self.somebody_commands(handle, [which], Reschedule(due_at))

    @precondition(lambda self: self.uuids)
    @rule(handle=handles, which=st.lists(picks, min_size=1, max_size=6), other=picks, before=st.booleans())
    def somebody_moves(self, handle: int, which: list[Pick], other: Pick, before: bool) -> None:
        anchor = self.task(other, Hold())
        self.somebody_commands(handle, which, MoveBefore(anchor) if before else MoveAfter(anchor))

    @rule(handle=handles, node=nodes)
    def a_node_dies(self, handle: int, node: int) -> None:
        dead = self.nodes[node]
        one, two = self.both(handle, lambda store: store.rescue(dead))
        assert sorted(two) == sorted(one)
        assert self.both(handle, lambda store: store.rescue(dead)) == ([], [])
        self.leave(dead)
        self.nodes[node] = self.join()
        self.compare()
        self.same_nodes(handle)

    @rule(handle=handles, node=nodes, on=st.booleans())
    def somebody_drains_a_node(self, handle: int, node: int, on: bool) -> None:
        self.both(handle, lambda store: store.drain(self.nodes[node], on=on))
        self.same_nodes(1 - handle)

    @rule(handle=handles, settings=settings_of_queues)
    def somebody_sets_a_queue(self, handle: int, settings: QueueSettings) -> None:
        self.both(handle, lambda store: store.set_queue(settings))
        self.queues[settings.name] = settings
        self.compare()

    @rule(handle=handles, queue=st.sampled_from([*QUEUES * 4, QUIET]), command=words)
    def somebody_steers_a_queue(self, handle: int, queue: str, command: QueueCommand) -> None:
        one, two = self.both(handle, lambda store: store.control(queue, command, by="ann"))
        assert two == one
        self.compare()

    @rule(
        handle=handles,
        seconds=st.sampled_from([0.0, 1.0, 30.0]),
        limit=st.sampled_from([1, 2, 500]),
        failed=st.sampled_from([None, None, True, False]),
    )
    def old_tasks_are_pruned(self, handle: int, seconds: float, limit: int, failed: bool | None) -> None:
        before = self.clock.now() - timedelta(seconds=seconds)
        one, two = self.both(handle, lambda store: store.prune(finished_before=before, limit=limit, failed=failed))
        assert two == one
        self.compare()

    @rule(handle=handles)
    def a_process_restarts(self, handle: int) -> None:
        self.run(self.handles[handle].close())
        self.handles[handle] = self.open_handle()
        self.compare()

    # --- values -------------------------------------------------------------------------------------------------------

    def record(self, task: Asked) -> TaskRecord:
        now = self.clock.now()
        self.made = number = self.made + 1
        uuid = f"00000000-0000-7000-8000-{number:012d}"
        if task.again and self.uuids:
            uuid = self.uuids[number % len(self.uuids)]
        return TaskRecord(
            uuid=uuid,
            consumer=task.source,
            queue=task.queue,
            args='{"n":%d}' % number,  # noqa: UP031 - braces
            priority=task.priority,
            key=task.key,
            bucket=task.bucket,
            requires=task.requires,
            dedupe_slot=task.slot,
            dedupe_scope=task.scope,
            group_id=task.group,
            on_failure=task.on_failure if task.after else None,
            due_at=now + timedelta(seconds=task.delay_s),
            created_at=now,
            updated_at=now,
        )

    def waits(self, tasks: list[Asked], made: list[TaskRecord]) -> dict[str, list[str]]:
        """Whom each task of a batch waits for."""
        waits: dict[str, list[str]] = {}
        for place, task in enumerate(tasks):
            among = {
                "store": self.uuids[-16:],
                "before": [r.uuid for r in made[:place]],
                "batch": [r.uuid for r in made],
            }
            parents = [among[one.where][one.n % len(among[one.where])] for one in task.after if among[one.where]]
            if parents:
                waits[made[place].uuid] = parents
        return waits

    def claim(self, pick: Pick, which: int) -> Claim:
        live = [pair for pair in self.claims if self.holds(pair[0])]
        among = live if pick.live and live else self.claims
        return among[-1 - pick.n % len(among)][which]

    def holds(self, claim: Claim) -> bool:
        return claim.uuid in self.known and self.known[claim.uuid].token == claim.token

    def task(self, pick: Pick, command: Command) -> str:
        """A task that the command probably fits, or any."""
        few = {Retry: TaskState.FAILED, Release: TaskState.PAUSED, Unblock: TaskState.BLOCKED, Block: TaskState.QUEUED}
        fits = {few[type(command)]} if type(command) in few else set(TaskState) - ENDED
        if isinstance(command, Cancel) and pick.n % 2:
            fits = {TaskState.RUNNING}
        live = [uuid for uuid in self.uuids if uuid in self.known and self.known[uuid].state in fits]
        among = live if pick.live and live else self.uuids
        return among[-1 - pick.n % len(among)]

    def move(self, ending: Ending, now: datetime) -> Move:
        error = ExecutionError(kind=ErrorKind.RUNTIME, message=ending.how, types=("OSError",), details={"n": 1})
        due = now + timedelta(seconds=ending.delay_s)
        match ending.how:
            case "completed":
                return Move.completed(at=now, result='{"ok":true}')
            case "failed":
                return Move.failed(at=now, error=error, note=GIVEN_UP)
            case "crashed":
                return Move.retrying(at=now, due_at=due, error=error, crashed=True)
            case "retrying":
                return Move.retrying(at=now, due_at=due, error=error)
            case "later":
                return Move.retrying(at=now, due_at=due, error=error, retried=False)
            case "given-back":
                return Move.given_back(at=now, note=Note(NoteCode.NODE_STOPPED))
            case "device-lost":
                return Move.taken_back(at=now, error=error, note=Note(NoteCode.DEVICE_LOST, facts={"device": "emu-1"}))
            case "devices-lost":
                return Move.lost(at=now, error=error, note=Note(NoteCode.DEVICE_LOST, facts={"device": "emu-1"}))
            case _:
                return Move.canceled(at=now, error=error)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def same_nodes(self, handle: int) -> None:
        one, two = self.both(handle, lambda store: store.nodes())
        mine, theirs = ({s.node.incarnation: (s.node, s.running, s.is_draining) for s in nodes} for nodes in (one, two))
        assert theirs == mine
        assert set(mine) == set(self.nodes)

    def compare(self) -> list[TaskRecord]:
        """Everything both stores hold is the same, and holds against the rules; the records."""
        self.seen["comparisons"] += 1
        one, two = self.run(self.memory.list_tasks(limit=10_000)), self.run(self.handles[0].list_tasks(limit=10_000))
        for mine, theirs in zip(one, two, strict=True):
            self.same(mine, theirs)
        numbers = [self.numbers[number] for number in sorted(self.numbers)]
        assert numbers == sorted(set(numbers))
        assert in_order(two) == in_order(one)
        tally = dict(Counter((record.queue, record.state) for record in one))
        assert self.both(0, lambda store: store.count()) == (tally, tally)
        assert self.both(1, lambda store: store.count()) == (tally, tally)
        self.compare_queues(one)
        self.compare_events({record.uuid: record.state for record in one})
        slots = Counter(record.dedupe_slot for record in one if record.dedupe_slot is not None)
        assert set(slots.values()) <= {1}
        for record in one:
            assert (record.state is TaskState.RUNNING) == (record.token is not None) == (record.node is not None)
            assert (record.state in ENDED) == (record.finished_at is not None)
            assert record.state not in ENDED or record.dedupe_slot is None
            assert record.open_dependencies == 0 or record.state in {TaskState.BLOCKED, TaskState.PAUSED}
            is_waiting = record.open_dependencies > 0 or record.blocked_by is not None
            assert is_waiting or record.state is not TaskState.BLOCKED
            assert record.blocked_by is None or record.state is TaskState.BLOCKED
            if record.state in ENDED:
                self.ends.setdefault(record.uuid, set()).add(record.state)
        self.check_parking(one)
        self.check_nothing_is_lost_sight_of()
        self.compare_groups(one)
        assert len({tuple(groups) for groups in self.both(1, lambda store: store.list_blockers())}) == 1
        self.known = {record.uuid: record for record in one}
        return one

    def compare_queues(self, records: list[TaskRecord]) -> None:
        """What the stores say of their queues is the same; one that is stopping has something to wait for."""
        mine, theirs = self.both(1, lambda store: store.queues())
        assert theirs == mine
        running = Counter(record.queue for record in records if record.state is TaskState.RUNNING)
        for status in mine:
            self.controls[status.name] = status.control
            assert status.control.state is not QueueState.STOPPING or running[status.name]

    def compare_groups(self, records: list[TaskRecord]) -> None:
        members = [record for record in records if record.group_id == "g"]
        tally = dict(Counter(record.state for record in members))
        assert self.both(0, lambda store: store.count_group("g")) == (tally, tally)
        one, two = self.both(1, lambda store: store.list_tasks(TaskFilter(group="g"), limit=10_000))
        assert [r.uuid for r in one] == [r.uuid for r in two] == [r.uuid for r in members]

    def same(self, mine: TaskRecord, theirs: TaskRecord) -> None:
        """Two records are the same, field by field; ids, tokens and places stand for the same numbers throughout.

        A store may skip numbers (SQLite does, when it replays a batch in which one add failed), so that it is their
        order that has to agree."""
        expected = msgspec.structs.asdict(mine)
        expected["id"] = self.number(mine.id, theirs.id)
        if mine.position % order.GAP and theirs.position % order.GAP:
            expected["position"] = theirs.position  # made by hand: it is the order that counts
        else:
            expected["position"] = self.number(mine.position // order.GAP, theirs.position // order.GAP)
            expected["position"] *= order.GAP
        if mine.token is not None and theirs.token is not None:
            expected["token"] = self.number(mine.token, theirs.token)
        differ = {
            name: (value, getattr(theirs, name)) for name, value in expected.items() if value != getattr(theirs, name)
        }
        assert not differ, f"memory and {self.name} differ on {mine.uuid}: {differ}"

    def number(self, mine: int, theirs: int) -> int:
        """What the other store has for the memory store's number, learned when it is first seen."""
        return self.numbers.setdefault(mine, theirs)

    def compare_events(self, states: dict[str, TaskState]) -> None:
        """What happened since the last look is told alike, follows the table of moves, and leads to what is stored."""
        one = self.run(self.memory.events(after=self.last_event))
        two = self.run(self.handles[1].events(after=self.last_theirs))
        numbers = [self.last_theirs, *(event.seq for event in two.events)]
        assert numbers == sorted(set(numbers))
        assert by_task(two.events) == by_task(one.events)
        self.last_event, self.last_theirs = one.last, two.last
        changed = set()
        for event in one.events:
            changed.add(event.uuid)
            if event.kind is EventKind.SUBMITTED:
                self.states[event.uuid] = {TaskState.QUEUED, TaskState.SCHEDULED, TaskState.BLOCKED}
            elif event.kind in STATES:
                old = self.states[event.uuid] & {old for old in TaskState if legal(old, STATES[event.kind])}
                assert old, f"{event.uuid} went from {self.states[event.uuid]} to {event.kind}"
                self.states[event.uuid] = {STATES[event.kind]}
        for uuid, state in states.items():
            assert state in self.states[uuid]
        for uuid in changed:
            runs, others = self.both(0, lambda store, uuid=uuid: store.list_attempts(uuid))  # type: ignore[misc]
            for mine, theirs in zip(runs, others, strict=True):
                assert theirs == msgspec.structs.replace(mine, token=self.number(mine.token, theirs.token))
            assert [run.token for run in runs] == sorted({run.token for run in runs})

    def check_claims(self, turned: Turned, records: list[TaskRecord]) -> None:
        """What was just claimed is in order, under new tokens, and within the limits of its queue and its key."""
        self.check_order(turned, records)
        tokens = [self.last_token, *(claim.token for claim in turned.claims)]
        assert tokens == sorted(set(tokens))
        self.last_token = tokens[-1]
        for claim in turned.claims:
            queue, key = claim.record.queue, claim.record.key
            rules, limit = self.settings(queue), self.limit(queue)
            running = sum(r.state is TaskState.RUNNING and r.queue == queue for r in records)
            assert limit is None or running <= limit
            if key is not None:
                assert sum(r.state in HOLDS_KEY and (r.queue, r.key) == (queue, key) for r in records) <= rules.per_key

    def check_order(self, turned: Turned, records: list[TaskRecord]) -> None:
        """Within a lane, or a line, those that started did so by place, and before all that were left there."""
        lanes: dict[Any, list[int]] = {}
        for claim in turned.claims:
            lanes.setdefault(self.lane(claim.record), []).append(claim.record.position)
        for places in lanes.values():
            assert places == sorted(places)
        for record in records:
            waits = record.state is TaskState.QUEUED and not record.is_parked
            if waits or (self.settings(record.queue).is_strict and record.stands_in_line):
                assert record.position > max(lanes.get(self.lane(record), [record.position - 1]))

    def lane(self, record: TaskRecord) -> Any:
        """What it shares with those it must not overtake."""
        match self.settings(record.queue).order:
            case QueueOrder.PRIORITY:
                return record.queue, record.lane, record.priority
            case QueueOrder.FIFO:
                return record.queue
            case QueueOrder.BUCKETS:
                return record.queue, record.bucket

    def check_claims_waited(self, turned: Turned) -> None:
        """What was claimed had waited for all that it was to wait for, as far as those are remembered."""
        for claim in turned.claims:
            for parent in self.after.get(claim.uuid, ()):
                ends = self.ends.get(parent, set())
                if parent in self.known and claim.record.on_failure is not OnFailure.IGNORE:
                    ends = ends & {TaskState.COMPLETED}
                assert ends, f"{claim.uuid} started before {parent} had ended as it should"

    def check_keys_were_idle(self, turned: Turned, records: list[TaskRecord]) -> None:
        """What was just added with the scope `key_idle` has a key with which nothing ran before the claims."""
        new = {added.uuid for adds in turned.added if isinstance(adds, list) for added in adds if added.is_new}
        started = {claim.uuid for claim in turned.claims}
        busy = {(r.queue, r.key) for r in records if r.state is TaskState.RUNNING and r.uuid not in started}
        for record in records:
            if record.uuid in new and record.dedupe_scope is DedupeScope.KEY_IDLE and record.key is not None:
                assert (record.queue, record.key) not in busy

    def check_nothing_startable_waits(self, turned: Turned, demand: Demand | None, records: list[TaskRecord]) -> None:
        """With room left in the demand and in the queue, nothing that may start was left waiting."""
        if demand is None:
            return
        running = Counter(record.queue for record in records if record.state is TaskState.RUNNING)
        quota = Quota(demand, {})
        for claim in turned.claims:
            assert quota.room(claim.record.queue, claim.record.lane) > 0
            quota.admit(claim.record.queue, claim.record.lane)
        heads: dict[Any, TaskRecord] = {}
        for record in sorted(records, key=lambda record: record.position):
            if record.stands_in_line:
                heads.setdefault(self.lane(record), record)
        for record in records:
            is_held_up = self.settings(record.queue).is_strict and heads.get(self.lane(record)) is not record
            if record.state is TaskState.QUEUED and not record.is_parked and not is_held_up:
                limit = self.limit(record.queue)
                full = limit is not None and running[record.queue] >= limit
                assert full or quota.room(record.queue, record.lane) <= 0

    def check_parking(self, records: list[TaskRecord]) -> None:
        """Of those waiting with one key, exactly the first that fit under its limit may start; no other is parked."""
        keyed: dict[tuple[str, str], list[TaskRecord]] = {}
        for record in records:
            if record.key is not None and (record.state is TaskState.QUEUED or record.state in HOLDS_KEY):
                keyed.setdefault((record.queue, record.key), []).append(record)
            else:
                assert not record.is_parked or record.state is TaskState.PAUSED
        for (queue, _), group in keyed.items():
            busy = sum(record.state in HOLDS_KEY for record in group)
            waiting = [record for record in group if record.state is TaskState.QUEUED]
            strict = self.settings(queue).is_strict
            waiting.sort(key=lambda record: (0 if strict else record.priority, record.position))
            free = max(0, self.settings(queue).per_key - busy)
            assert [record.is_parked for record in waiting] == [place >= free for place in range(len(waiting))]

    def check_nothing_is_lost_sight_of(self) -> None:
        """Whatever a store remembers so as not to look at everything, it comes across all that may start."""

    def settings(self, queue: str) -> QueueSettings:
        return self.queues.get(queue) or QueueSettings(name=queue)

    def limit(self, queue: str) -> int | None:
        """How many of the queue may run, by what people say of it and by its rules."""
        control = self.controls.get(queue, UNTOUCHED)
        if not control.is_open:
            return 0
        return self.settings(queue).concurrency if control.concurrency is None else control.concurrency


def in_order(records: list[TaskRecord]) -> list[tuple[str, str]]:
    """Those that have not ended, by their places in their queues, which no two share."""
    left = [record for record in records if record.state not in ENDED]
    assert len({(record.queue, record.position) for record in left}) == len(left)
    return [(r.queue, r.uuid) for r in sorted(left, key=lambda r: (r.queue, r.position))]


def by_task(events: list[Event]) -> dict[str, list[tuple[Any, ...]]]:
    """What is told of each task, in order. Of different tasks in one turn, a store may tell in any order."""
    told: dict[str, list[tuple[Any, ...]]] = {}
    for event in events:
        told.setdefault(event.uuid, []).append(msgspec.structs.astuple(event)[1:])
    return told


def legal(old: TaskState, new: TaskState) -> bool:
    try:
        check_move(old, new)
    except TaskyardError:
        return False
    return True


def answer(given: list[Added] | TaskyardError | None) -> Any:
    """What a settle or an add was answered, so that two stores' answers can be compared."""
    match given:
        case list():
            return [(added.uuid, added.is_new, added.until) for added in given]
        case DuplicateTask():
            return "duplicate", given.existing, given.slot, given.until, given.key
        case DependencyCycle():
            return "cycle", given.uuids
        case UnknownTask():
            return "unknown", given.uuid
        case ClaimLost():
            return "lost", given.uuid
        case InvalidInput():
            return "invalid"
    return given


def refusal(refused: TaskyardError | None) -> Any:
    match refused:
        case SlotTaken():
            return "taken", refused.uuid, refused.holder, refused.until
        case CommandRefused():
            return "refused", refused.uuid, refused.command, refused.state
        case UnknownTask():
            return "unknown", refused.uuid
    return refused
