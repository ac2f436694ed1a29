"""One command for all that match: what is meant, in which order, and what the report says."""

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from taskyard.errors import InvalidInput, StoreUnavailable
from taskyard.model.audit import AuditEntry
from taskyard.model.command import FITS, Command, Retry
from taskyard.model.execution import ErrorKind
from taskyard.model.move import Move
from taskyard.model.settle import QUARANTINE_AFTER
from taskyard.model.state import TaskState
from taskyard.model.task import OnFailure, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.ports.store import Add, Applied
from taskyard.queueing.controller import QueueController
from taskyard.queueing.matching import CHUNK, PATIENCE, BulkReport, Matching
from taskyard.stores.memory import MemoryStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node, a_record, an_error, room

A = a_node("a").incarnation
S = TaskState


class Desk(MemoryStore):
    """A store as `Matching` takes it. `rival` is asked something right before each command; `chunks` are left until it
    fails; to read a page and to change a chunk take so many seconds."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.rival: Command | None = None
        self.chunks = 1_000
        self.read_s = self.change_s = 0.0

    async def list_ids(
        self, where: TaskFilter = ALL_TASKS, *, before_id: int | None = None, limit: int = CHUNK
    ) -> list[tuple[int, str]]:
        self.clock.advance(self.read_s)
        return await super().list_ids(where, before_id=before_id, limit=limit)

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]:
        if self.chunks == 0:
            raise StoreUnavailable("the disk is gone")
        self.chunks -= 1
        if self.rival is not None:
            rival, self.rival = self.rival, None
            await super().apply(uuids[:1], rival)
        self.clock.advance(self.change_s)
        return await super().apply(uuids, command, by=by, where=where, audit=audit)


@pytest.fixture
async def desk() -> Desk:
    desk = Desk(ManualClock())
    await desk.open()
    await desk.join(a_node("a"))
    return desk


async def fail(
    desk: Desk,
    *records: TaskRecord,
    after: dict[str, list[str]] | None = None,
    errors: dict[str, str] | None = None,
) -> None:
    """Add these, and let each that starts fail, some sources with an error of their own."""
    own = {source: an_error(ErrorKind.RUNTIME, "no", error) for source, error in (errors or {}).items()}
    await desk.turn(A, adds=[Add(records, after=after or {})])
    while claims := (await desk.turn(A, demand=room(100))).claims:
        ends = [own.get(claim.record.consumer) or an_error() for claim in claims]
        moves = [Move.failed(at=desk.clock.now(), error=error) for error in ends]
        await desk.turn(A, settles=list(zip(claims, moves, strict=True)))


async def states(desk: Desk, records: Sequence[TaskRecord]) -> list[TaskState]:
    return [outcome.state for outcome in await desk.outcomes([record.uuid for record in records]) if outcome]


@pytest.mark.spec("QUE-15", "QUE-27")
@pytest.mark.parametrize("to_head", [True, False])
async def test_a_chain_that_failed_is_sent_again_by_one_call(desk: Desk, to_head: bool):
    """What failed because another did is sent again with it, however long the chain is, and those that do not wait for
    each other start in the order of their submit."""
    chain = [a_record(on_failure=OnFailure.FAIL) for _ in range(4)]
    alone = [a_record() for _ in range(2)]
    after = {later.uuid: [earlier.uuid] for earlier, later in pairwise(chain)}
    await fail(desk, alone[0], *chain, alone[1], after=after)
    report = await Matching(TaskFilter(states=(S.FAILED,)), desk).retry(to_head=to_head)
    assert report == BulkReport(matched=6, moved=6)
    assert await states(desk, chain) == [S.QUEUED, S.BLOCKED, S.BLOCKED, S.BLOCKED]
    claims = (await desk.turn(A, demand=room(9))).claims
    assert [claim.uuid for claim in claims] == [alone[0].uuid, chain[0].uuid, alone[1].uuid]


@pytest.mark.spec("QUE-15", "QUE-27")
@pytest.mark.parametrize("to_head", [True, False])
async def test_what_failed_with_those_that_are_meant_goes_with_them(desk: Desk, to_head: bool):
    """Where the error is named, those are sent again as well that failed only because one of these did, however far
    down; what failed because of another error's task stays, and so does what the filter leaves out otherwise."""
    chain = [a_record(on_failure=OnFailure.FAIL) for _ in range(4)]
    elsewhere = a_record(on_failure=OnFailure.FAIL, queue="cpu")
    other, its = a_record(consumer="shrink"), a_record(on_failure=OnFailure.FAIL)
    after = {later.uuid: [earlier.uuid] for earlier, later in pairwise(chain)}
    after |= {its.uuid: [other.uuid], elsewhere.uuid: [chain[0].uuid]}
    await fail(desk, chain[0], *chain[:0:-1], elsewhere, other, its, after=after, errors={"shrink": "KeyError"})
    named = TaskFilter(error="OSError", queue="default")
    assert await Matching(named, desk).retry(to_head=to_head, dry_run=True) == BulkReport(matched=4)
    assert await Matching(named, desk).retry(to_head=to_head) == BulkReport(matched=4, moved=4)
    assert await states(desk, chain) == [S.QUEUED, S.BLOCKED, S.BLOCKED, S.BLOCKED]
    assert await states(desk, [elsewhere, other, its]) == [S.FAILED] * 3


async def test_who_waits_for_what_is_final_is_told(desk: Desk):
    """One whose dependency was not sent again is refused, and counted by why."""
    parent, child = a_record(), a_record(on_failure=OnFailure.FAIL, consumer="shrink")
    await fail(desk, parent, child, after={child.uuid: [parent.uuid]})
    matching = Matching(TaskFilter(consumer="shrink"), desk)
    reasons = {"dependency_failed": "one of its dependencies failed"}
    assert await matching.retry() == BulkReport(matched=1, unfit={"dependency_failed": 1}, reasons=reasons)
    assert parent.uuid in str(matching.first_refused)


@pytest.mark.spec("SCH-13")
async def test_what_took_its_workers_down_is_left_out(desk: Desk):
    """A retry of all that failed leaves those in quarantine where they are, and says so; whoever asks for them gets
    them."""
    poisoned, failed = a_record(crashes=QUARANTINE_AFTER), a_record()
    await fail(desk, poisoned, failed)
    matching = Matching(TaskFilter(), desk)
    assert await matching.retry(dry_run=True) == BulkReport(matched=1, quarantined=1)
    assert await matching.retry() == BulkReport(matched=1, moved=1, quarantined=1)
    assert await states(desk, [poisoned, failed]) == [S.FAILED, S.QUEUED]
    assert (await matching.retry(include_quarantined=True, dry_run=True)).matched == 1
    assert await Matching(TaskFilter(quarantined=True), desk).retry() == BulkReport(matched=1, moved=1)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_what_a_command_does_not_fit_is_not_meant(desk: Desk, dry_run: bool):
    """Where no state is named, only what fits is counted; what is named and does not fit is counted by why."""
    await desk.turn(A, adds=[Add([a_record() for _ in range(3)])])
    assert await Matching(TaskFilter(), desk).retry(dry_run=dry_run) == BulkReport()
    report = await Matching(TaskFilter(states=(S.QUEUED, S.FAILED)), desk).retry(dry_run=dry_run)
    reasons = {"not_finished": "it has not finished yet"}
    assert report == BulkReport(matched=3, unfit={"not_finished": 3}, reasons=reasons)
    assert (report.fitting, report.refused) == (0, 3)


async def test_who_changes_meanwhile_is_counted_apart(desk: Desk):
    """A task that is no longer what was meant when its turn comes is left alone, and is not among those that do not
    fit."""
    first, last = a_record(), a_record()
    await fail(desk, first, last)
    desk.rival = Retry()
    report = await Matching(TaskFilter(states=(S.FAILED,)), desk).retry()
    assert report == BulkReport(matched=2, moved=1, changed_meanwhile=1)


async def test_what_was_done_before_it_failed_is_known(desk: Desk):
    """When the store fails half way, the report says how far it came."""
    await desk.turn(A, adds=[Add([a_record() for _ in range(CHUNK + 5)])])
    desk.chunks = 1
    matching = Matching(TaskFilter(), desk)
    with pytest.raises(StoreUnavailable):
        await matching.cancel()
    assert matching.report == BulkReport(matched=CHUNK + 5, moved=CHUNK)
    assert (await desk.count())["default", S.CANCELED] == CHUNK


async def test_what_was_sent_when_it_was_cancelled_is_counted(desk: Desk, monkeypatch):
    """Who is cancelled while a chunk is with the store waits for it, and the report has all that was changed."""
    await desk.turn(A, adds=[Add([a_record() for _ in range(CHUNK + 5)])])
    sent, may_go = asyncio.Event(), asyncio.Event()
    apply = Desk.apply

    async def slow(*args: Any, **named: Any) -> Any:
        sent.set()
        await may_go.wait()
        return await apply(*args, **named)

    monkeypatch.setattr(Desk, "apply", slow)
    matching = Matching(TaskFilter(), desk)
    canceling = asyncio.ensure_future(matching.cancel())
    await sent.wait()
    canceling.cancel()
    may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await canceling
    assert matching.report == BulkReport(matched=CHUNK, moved=CHUNK)
    assert (await desk.count())["default", S.CANCELED] == CHUNK


async def rests(desk: Desk, doing: Awaitable[BulkReport]) -> list[float]:
    """How long others have the store to themselves meanwhile, each time."""
    task, found = asyncio.ensure_future(doing), list[float]()
    while not task.done():
        await asyncio.sleep(0)
        if desk.clock.next_wake_s is not None:
            found.append(desk.clock.next_wake_s)
            desk.clock.advance(desk.clock.next_wake_s)
    await task
    return found


@pytest.mark.spec("QUE-15")
async def test_others_have_their_turn_between_chunks(desk: Desk):
    """After each chunk but the last others have the store to themselves for twice as long as it took, to find it as
    well as to change it; also while those are only counted, and where all are found before the first is changed."""
    await fail(desk, *[a_record() for _ in range(2 * CHUNK + 5)])
    desk.read_s, desk.change_s = 3.0, 5.0
    matching = Matching(TaskFilter(states=(S.FAILED,), quarantined=False), desk)
    assert await rests(desk, matching.retry(dry_run=True)) == [PATIENCE * 3.0] * 2
    assert await rests(desk, matching.retry(to_head=False)) == [PATIENCE * 3.0] * 2 + [PATIENCE * 5.0] * 2
    assert await rests(desk, Matching(TaskFilter(), desk).hold()) == [PATIENCE * 8.0] * 2
    assert PATIENCE == 2


def test_every_command_says_what_it_fits():
    """The table that a dry run counts by has every command, each with a state that it fits."""
    assert set(FITS) == set(Command.__args__)
    assert all(FITS.values())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"states": "failed"}, r"states must be a list of states, such as \['failed'\]"),
        ({"states": ["broken"]}, "states has 'broken', which is not a state; states are created, "),
        ({"states": 5}, "states must be a list of states"),
        ({"created_after": ManualClock().now().replace(tzinfo=None)}, "created_after"),
        ({"finished_before": "yesterday"}, "finished_before must be a datetime with a time zone"),
        ({"error": TimeoutError}, "give its name, 'TimeoutError'"),
        ({"queue": 5}, "queue must be a string, or None for any"),
        ({"quarantined": "yes"}, "quarantined must be True, False, or None"),
    ],
)
def test_what_is_no_filter_is_told(wrong: dict[str, object], words: str):
    """A filter that no task could match, or that a store could not read, is refused where it is made."""
    with pytest.raises(InvalidInput, match=words):
        TaskFilter(**wrong)  # type: ignore[arg-type]


def test_states_may_be_named():
    """The names of states are as good as the states."""
    assert TaskFilter(states=["failed", "queued"]) == TaskFilter(states=(S.FAILED, S.QUEUED))  # type: ignore[arg-type]


async def test_a_queue_steers_its_own_tasks_only(desk: Desk):
    """A filter that names another queue than the one that is asked is a mistake, and told."""
    queue = QueueController("cpu", desk)
    assert queue.matching(TaskFilter(queue="cpu")).where.queue == queue.matching().where.queue == "cpu"
    with pytest.raises(InvalidInput, match="the filter names queue 'disk'; this is 'cpu'"):
        queue.matching(TaskFilter(queue="disk"))
