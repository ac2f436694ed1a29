"""Which tasks may start here: checks that block tasks, blockers that are freed, and places with labels."""

import asyncio
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest

from taskyard.errors import InvalidInput, OutcomeUnknown, StoreUnavailable
from taskyard.model.blocker import Blocker, encode_requirements, stored_detail
from taskyard.model.command import Block, StartNow, Unblock
from taskyard.model.event import EventKind
from taskyard.model.limits import Demand
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.places import Place, Places
from taskyard.ports.store import Add
from taskyard.queueing import checks
from taskyard.queueing.blockers import LOOKS_AT_MOST, RECHECK_S, RECHECKS_AT_ONCE
from taskyard.stores.memory import MemoryStore
from tests.engine.support import Rig, Work, quiet

BLOCKED, QUEUED, RUNNING = TaskState.BLOCKED, TaskState.QUEUED, TaskState.RUNNING


@dataclass
class Disks:
    """An admission check: a task whose argument names a full disk is blocked."""

    full: set[str] = field(default_factory=set)
    kinds: Collection[str] = ("disk",)
    looked: list[str] = field(default_factory=list)
    slow: asyncio.Event | None = None
    broken: Exception | None = None
    connected: list[Callable[[str, str], None]] = field(default_factory=list)

    async def check(self, record: TaskRecord) -> Blocker | None:
        self.looked.append(record.uuid)
        if self.slow is not None:
            await self.slow.wait()
        if self.broken is not None:
            raise self.broken
        disk = record.args
        return Blocker("disk", disk) if disk in self.full else None

    def connect(self, freed: Callable[[str, str], None]) -> Callable[[], None]:
        self.connected.append(freed)
        return lambda: self.connected.remove(freed)

    def freed(self, kind: str, detail: str) -> None:
        for freed in self.connected:
            freed(kind, detail)

    def free(self, disk: str) -> None:
        self.full.discard(disk)
        self.freed("disk", disk)


class Named(Disks):
    """Blocks all tasks under one name."""

    def __init__(self, detail: str) -> None:
        super().__init__()
        self.detail, self.is_free = detail, False

    async def check(self, record: TaskRecord) -> Blocker | None:
        return None if self.is_free else Blocker("disk", self.detail)


def rig_with(disks: Disks, **settings: Any) -> Rig:
    return Rig(checks=(disks,), **settings)


async def settled(rig: Rig) -> None:
    """Everything that can happen without time has happened."""
    for _ in range(5):
        await quiet()


async def test_a_blocked_task_never_shows_as_running():
    """It writes no started event, uses no attempt and no slot, and says what it waits for."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks, max_running=1)
    rig.consumer("shrink", work)
    await rig.engine.start()
    blocked, other = await rig.submit("shrink", args="/data"), await rig.submit("shrink", args="/home")
    await settled(rig)
    assert work.began == [other]
    found = await rig.found(blocked)
    assert (found.state, found.attempt, found.node, found.blocked_by) == (BLOCKED, 0, None, "disk:/data")
    told = [event.kind for event in (await rig.store.events(after=0)).events if event.uuid == blocked]
    assert told == [EventKind.SUBMITTED, EventKind.BLOCKED]
    work.let_go(other)
    disks.free("/data")
    work.let_go(blocked)
    await rig.outcome(blocked)
    assert work.began == [other, blocked]
    await rig.engine.stop(1)


@pytest.mark.parametrize("detail", ["/media/" + "é" * 400, "/media/\udce9t\udce9.mp4", "a\0b"])
async def test_a_detail_may_be_the_name_of_any_file(detail: str):
    """A long path, and one that is no text, block and free as well."""
    work = Work()
    disks = Named(detail)
    rig = rig_with(disks)
    rig.consumer("shrink", work)
    await rig.engine.start()
    uuid = await rig.submit("shrink")
    await settled(rig)
    found = await rig.found(uuid)
    assert (found.state, found.blocked_by) == (BLOCKED, f"disk:{stored_detail(detail)}")
    disks.is_free = True
    disks.freed("disk", detail)
    await settled(rig)
    assert work.began == [uuid]
    work.let_go(uuid)
    await rig.engine.stop(1)


@pytest.mark.spec("QUE-30")
async def test_one_full_disk_costs_ten_looks():
    """Of very many tasks that wait for one disk ten are looked at until it is freed, and then they run in order."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks, max_running=1000)
    rig.consumer("shrink", work, concurrency=1000)
    await rig.engine.start()
    uuids = await rig.submit_many("shrink", 200, args="/data")
    await settled(rig)
    for _ in range(20):
        uuids += await rig.submit_many("shrink", 5, args="/data")
        await settled(rig)
    assert len(disks.looked) == LOOKS_AT_MOST
    counts = await rig.store.count()
    assert counts == {("default", BLOCKED): LOOKS_AT_MOST, ("default", QUEUED): 300 - LOOKS_AT_MOST}
    disks.free("/data")
    await settled(rig)
    assert work.began == uuids
    for uuid in uuids:
        work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_declared_disk_holds_up_only_its_own():
    """A task that requires `{"disk": …}` waits without a look while that is full; others of its consumer go on."""
    disks, work = Disks({"/a"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=100)
    await rig.engine.start()
    needs = {disk: encode_requirements({"disk": disk}) for disk in ("/a", "/b")}
    full = await rig.submit_many("shrink", 30, args="/a", requires=needs["/a"])
    free = await rig.submit_many("shrink", 30, args="/b", requires=needs["/b"])
    await settled(rig)
    assert work.began == free
    assert [uuid for uuid in disks.looked if uuid in full] == full[: len(disks.looked) - 30]
    assert len(disks.looked) - 30 <= LOOKS_AT_MOST
    disks.free("/a")
    await settled(rig)
    assert work.began == free + full
    for uuid in free + full:
        work.let_go(uuid)
    await rig.engine.stop(1)


@pytest.mark.parametrize("order", [QueueOrder.FIFO, QueueOrder.BUCKETS])
async def test_in_a_strict_queue_a_blocked_head_holds_the_line(order):
    """Nobody passes a blocked task where the order is strict."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=9)
    await rig.store.set_queue(QueueSettings(name="default", order=order))
    await rig.engine.start()
    uuids = [await rig.submit("shrink", args=disk) for disk in ("/data", "/home", "/home")]
    await settled(rig)
    assert work.began == []
    disks.free("/data")
    await settled(rig)
    assert work.began == uuids
    for uuid in uuids:
        work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_lost_signal_costs_half_a_minute():
    """Without a signal one task of each blocker is checked again after a while, and no other."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    uuids = await rig.submit_many("shrink", 50, args="/data")
    await settled(rig)
    await rig.advance(RECHECK_S)
    await settled(rig)
    assert disks.looked[LOOKS_AT_MOST:] == [uuids[0]]
    assert work.began == []
    disks.full.clear()
    await rig.advance(RECHECK_S)
    await settled(rig)
    assert work.began == uuids
    for uuid in uuids:
        work.let_go(uuid)
    await rig.engine.stop(1)


async def test_what_another_node_has_blocked_is_freed_here():
    """A node that died took its signals with it: the next one checks one task of each blocker when it starts."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    uuids = await rig.submit_many("shrink", 20, args="/data")
    await settled(rig)
    await rig.engine.stop(0)
    still, free = Disks({"/data"}), Disks()
    for disks, began in ((still, []), (free, uuids)):
        other = Rig(rig.store, rig.clock, checks=(disks,))
        other.consumer("shrink", work, concurrency=50)
        await other.engine.start()
        await settled(other)
        assert work.began == began
        await other.engine.stop(0)
    assert still.looked == [uuids[0]]


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_check_that_fails_blocks_the_task(how, caplog, monkeypatch):
    """A task is not started because nobody could tell whether it may; it is checked again later."""
    disks, work = Disks(), Work()
    if how == "fails":
        disks.broken = OSError("stale file handle")
    else:
        disks.slow = asyncio.Event()
        monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 0.05)
    rig = rig_with(disks)
    rig.consumer("shrink", work)
    await rig.engine.start()
    uuid = await rig.submit("shrink", args="/data")
    with rig.engine.changes() as changes:
        while await rig.state(uuid) is QUEUED:
            changes.clear()
            await changes.wait()
    assert (await rig.found(uuid)).blocked_by == "check:Disks"
    assert "the admission check Disks failed" in caplog.text
    disks.broken, disks.slow = None, None
    await rig.advance(RECHECK_S)
    await settled(rig)
    assert work.began == [uuid]
    work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_node_that_drains_claims_nothing_that_was_admitted():
    """A drain between the check and the claim counts; the task starts when the drain is taken back."""
    disks, work = Disks(slow=asyncio.Event()), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work)
    await rig.engine.start()
    uuid = await rig.submit("shrink", args="/data")
    await settled(rig)
    await rig.store.drain(rig.engine.incarnation)
    rig.store.hint()
    await settled(rig)
    assert disks.slow is not None
    disks.slow.set()
    await settled(rig)
    assert work.began == []
    assert await rig.state(uuid) is QUEUED
    await rig.store.drain(rig.engine.incarnation, on=False)
    rig.store.hint()
    await settled(rig)
    assert work.began == [uuid]
    work.let_go(uuid)
    await rig.engine.stop(1)


# --- places -----------------------------------------------------------------------------------------------------------

EU, US = encode_requirements({"role": "eu"}), encode_requirements({"role": "us"})


def phones(*roles: str) -> Places:
    return Places([Place(f"emu-{n}", {"role": role}) for n, role in enumerate(roles, 1)])


@pytest.mark.spec("DEV-04")
async def test_each_place_runs_one_task_at_a_time():
    """As many run at once as there are places; each run knows its place, and so does its attempt."""
    rig, work = Rig(), Work()
    rig.consumer("daily", work, places=phones("eu", "eu"))
    await rig.engine.start()
    uuids = await rig.submit_many("daily", 5)
    await settled(rig)
    assert work.began == uuids[:2]
    running = [await rig.found(uuid) for uuid in uuids[:2]]
    assert sorted(record.device or "" for record in running) == ["emu-1", "emu-2"]
    for uuid in uuids:
        work.let_go(uuid)
    for uuid in uuids:
        await rig.outcome(uuid)
    assert work.most_at_once == 2
    places = [(await rig.store.list_attempts(uuid))[0].device for uuid in uuids]
    assert set(places) == {"emu-1", "emu-2"}
    await rig.engine.stop(1)


async def test_a_task_runs_only_where_the_labels_fit():
    """It waits for a place with all labels that it requires, and others pass it."""
    rig, work = Rig(), Work()
    rig.consumer("daily", work, places=phones("eu", "us"))
    await rig.engine.start()
    first, second, other = [await rig.submit("daily", requires=role) for role in (EU, EU, US)]
    await settled(rig)
    assert work.began == [first, other]
    assert await rig.state(second) is QUEUED
    work.let_go(other)
    await rig.outcome(other)
    await settled(rig)
    assert await rig.state(second) is QUEUED
    work.let_go(first)
    await settled(rig)
    assert (await rig.found(second)).device == "emu-1"
    work.let_go(second)
    await rig.engine.stop(1)


async def test_a_task_without_requirements_takes_the_plainest_place():
    """Places with more labels are left for tasks that need them."""
    rig, work = Rig(), Work()
    places = Places([Place("rich", {"role": "eu", "gpu": "yes"}), Place("plain")])
    rig.consumer("daily", work, places=places)
    await rig.engine.start()
    uuid = await rig.submit("daily")
    await settled(rig)
    assert (await rig.found(uuid)).device == "plain"
    work.let_go(uuid)
    await rig.engine.stop(1)


@pytest.mark.spec("DEV-03")
async def test_in_a_strict_queue_the_head_waits_for_its_place():
    """The head is never skipped and never put back: while its place is taken, an idle one that does not fit waits."""
    rig, work = Rig(), Work()
    await rig.store.set_queue(QueueSettings(name="default", order=QueueOrder.FIFO))
    rig.consumer("daily", work, places=phones("eu", "us"))
    await rig.engine.start()
    uuids = [await rig.submit("daily", requires=role) for role in (EU, EU, US)]
    await settled(rig)
    assert work.began == uuids[:1]
    work.let_go(uuids[0])
    await rig.outcome(uuids[0])
    await settled(rig)
    assert work.began == uuids
    told = [event.kind for event in (await rig.store.events(after=0)).events if event.uuid == uuids[1]]
    assert told == [EventKind.SUBMITTED, EventKind.STARTED]
    for uuid in uuids:
        work.let_go(uuid)
    await rig.engine.stop(1)


@pytest.mark.spec("DEV-11", "DEV-12", "DEV-18")
async def test_places_come_and_go():
    """A place that is not ready, or was removed, gets no task; one that is made ready, or added, gets one at once."""
    rig, work, places = Rig(), Work(), Places()
    rig.consumer("daily", work, places=places)
    await rig.engine.start()
    uuids = await rig.submit_many("daily", 4)
    await settled(rig)
    assert work.began == []
    places.add("emu-1", is_ready=False)
    await settled(rig)
    assert work.began == []
    places.set_ready("emu-1", True)
    await settled(rig)
    assert work.began == uuids[:1]
    places.add("emu-2")
    await settled(rig)
    assert work.began == uuids[:2]
    places.remove("emu-1")
    work.let_go(uuids[0])
    await rig.outcome(uuids[0])
    await settled(rig)
    assert work.began == uuids[:2]
    work.let_go(uuids[1])
    await rig.outcome(uuids[1])
    await settled(rig)
    assert work.began == uuids[:3]
    assert [(await rig.found(uuid)).device for uuid in uuids] == [None, None, "emu-2", None]
    for uuid in uuids:
        work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_plain_consumer_beside_one_with_places_keeps_the_order_of_a_queue():
    """Of one queue at its limit the task that goes next is started, whether its consumer has places or not."""
    rig, work = Rig(), Work()
    await rig.store.set_queue(QueueSettings(name="default", concurrency=1, order=QueueOrder.FIFO))
    rig.consumer("daily", work, places=phones("eu"))
    rig.consumer("plain", work, concurrency=9)
    await rig.engine.start()
    uuids = [await rig.submit(name) for name in ("plain", "daily", "plain", "daily")]
    for n, uuid in enumerate(uuids, 1):
        await settled(rig)
        assert work.began == uuids[:n]
        work.let_go(uuid)
        await rig.outcome(uuid)
    await rig.engine.stop(1)


async def test_a_claim_whose_answer_was_lost_keeps_its_place():
    """After a claim that went unanswered the runs are found again, at the places that they were given."""
    rig, work = Rig(), Work()
    rig.consumer("daily", work, places=phones("eu", "us"))
    await rig.engine.start()
    await settled(rig)
    records = rig.record("daily", requires=US), rig.record("daily", requires=EU)
    await MemoryStore.turn(rig.store, "elsewhere", adds=[Add(records)])
    rig.store.unanswered = OutcomeUnknown("no answer")
    rig.store.hint()
    await settled(rig)
    assert rig.store.unanswered is None
    await rig.advance(5)
    await settled(rig)
    assert sorted(work.began) == sorted(record.uuid for record in records)
    assert [(await rig.found(record.uuid)).device for record in records] == ["emu-2", "emu-1"]
    third = await rig.submit("daily")
    await settled(rig)
    assert await rig.state(third) is QUEUED
    for uuid in (*work.began, third):
        work.let_go(uuid)
    await rig.outcome(third)
    await rig.engine.stop(1)


async def test_nothing_is_asked_where_there_is_nothing_to_admit():
    """A node without places and checks claims in one step, as before."""
    rig, work = Rig(), Work()

    async def no_preview(demand: object) -> list[TaskRecord]:
        raise AssertionError("a preview was asked for")

    rig.store.preview = no_preview  # type: ignore[method-assign]
    rig.consumer("plain", work)
    await rig.engine.start()
    uuid = await rig.submit("plain")
    work.let_go(uuid)
    await rig.outcome(uuid)
    assert await rig.store.list_ids(TaskFilter(blocker="disk")) == []
    await rig.engine.stop(1)


# --- what must not hold up others -------------------------------------------------------------------------------------


async def test_a_stream_of_newcomers_starves_nobody():
    """Tasks that arrive between a look and its claim, and would go first, do not end the claim of another lane."""
    rig, work = rig_with(Disks()), Work()
    rig.consumer("io", work, concurrency=1000)
    rig.consumer("gpu", work, concurrency=1)
    await rig.engine.start()
    preview = rig.store.preview

    async def preview_and_add(demand: Demand) -> list[TaskRecord]:
        found = await preview(demand)
        if len(rig.store.asked) < 50:
            rig.store.asked.append(0)
            await MemoryStore.turn(rig.store, "elsewhere", adds=[Add([rig.record("io", priority=0, queue="io")])])
        return found

    rig.store.preview = preview_and_add  # type: ignore[method-assign]
    uuid = await rig.submit("gpu", priority=2)
    for _ in range(5):
        rig.store.hint()
        await settled(rig)
    assert uuid in work.began
    for began in work.began:
        work.let_go(began)
    await rig.engine.stop(0)


class Wrong(Disks):
    """A check that answers badly for some tasks."""

    async def check(self, record: TaskRecord) -> Blocker | None:
        match record.args:
            case "cancelled":
                raise asyncio.CancelledError
            case "exit":
                sys.exit(3)
            case "no blocker":
                return "full"  # type: ignore[return-value]
            case "other kind":
                return Blocker("memory", "all")
            case "no text":
                return Blocker("disk", b"caf\xe9")  # type: ignore[arg-type]
            case "too long":
                return Blocker("disk", "d" * 5000)
        return await super().check(record)


@pytest.mark.parametrize("args", ["cancelled", "exit", "no blocker", "other kind", "no text", "too long"])
async def test_a_bad_answer_costs_one_task(args, caplog):
    """What a check does wrong blocks the task that it was asked about, and is logged; others start."""
    rig, work = rig_with(Wrong()), Work()
    rig.consumer("shrink", work, concurrency=9)
    await rig.engine.start()
    bad, other = await rig.submit("shrink", args=args), await rig.submit("shrink", args="/home")
    await settled(rig)
    assert work.began == [other]
    assert (await rig.found(bad)).blocked_by == "check:Wrong"
    assert "the admission check Wrong failed" in caplog.text
    work.let_go(other)
    await rig.engine.stop(1)


async def test_ten_tasks_that_a_check_cannot_judge_do_not_hold_up_the_rest_for_ever():
    """In every round the next ten are looked at; those that pass later are freed, whatever the others do."""
    wrong, work = Wrong(), Work()
    rig = rig_with(wrong)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    bad = await rig.submit_many("shrink", 12, args="no blocker")
    good = await rig.submit("shrink", args="/home")
    for _ in range(3):
        await settled(rig)
        await rig.advance(RECHECK_S)
    await settled(rig)
    assert work.began == [good]
    assert {(await rig.found(uuid)).blocked_by for uuid in bad} == {"check:Wrong"}
    work.let_go(good)
    await rig.engine.stop(1)


async def test_tasks_that_a_check_can_never_judge_do_not_starve_an_older_one():
    """The rounds go through all tasks that a check failed for, and not only through the ten newest."""
    wrong, work = Wrong(broken=OSError("stale file handle")), Work()
    rig = rig_with(wrong)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    good = await rig.submit("shrink", args="/home")
    bad = await rig.submit_many("shrink", 25, args="no blocker")
    await settled(rig)
    await rig.advance(RECHECK_S)
    await settled(rig)
    assert (await rig.store.count())["default", BLOCKED] == 2 * LOOKS_AT_MOST
    wrong.broken = None
    for _ in range(4):
        await rig.advance(RECHECK_S)
        await settled(rig)
    assert work.began == [good]
    assert {(await rig.found(uuid)).blocked_by for uuid in bad} == {"check:Wrong"}
    work.let_go(good)
    await rig.engine.stop(1)


async def submit_by_disk(rig: Rig, disks: list[str]) -> list[str]:
    needs = {disk: encode_requirements({"disk": disk}) for disk in disks}
    return [await rig.submit("shrink", args=disk, requires=needs[disk]) for disk in disks]


async def test_a_check_that_hangs_for_many_lanes_costs_one_wait():
    """The first tasks of other lanes are checked while the check hangs for one."""
    disks, work = Disks(slow=asyncio.Event()), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    hanging = [rig.record("shrink", requires=encode_requirements({"disk": f"/nfs-{n}"})) for n in range(8)]
    await rig.engine.start()
    await rig.offer(*hanging)
    await settled(rig)
    assert disks.looked == [record.uuid for record in hanging]
    assert disks.slow is not None
    disks.slow.set()
    await settled(rig)
    assert work.began == disks.looked
    for uuid in work.began:
        work.let_go(uuid)
    await rig.engine.stop(1)


class Hanging(Disks):
    """Hangs for some tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.was_given_up = asyncio.Event()

    async def check(self, record: TaskRecord) -> Blocker | None:
        self.looked.append(record.uuid)
        if record.args == "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                self.was_given_up.set()
        return None


async def test_a_check_that_hangs_for_one_task_holds_up_others_for_its_time_only(monkeypatch):
    """They start as soon as it was given up, and also after it has hung again in a round."""
    monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 0.05)
    disks, work = Hanging(), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    bad = await rig.submit("shrink", args="hangs")
    for looks in (1, 2):
        good = await rig.submit("shrink", args="fine")
        work.let_go(good)
        await rig.outcome(good)
        assert (await rig.found(bad)).blocked_by == "check:Hanging"
        assert disks.looked.count(bad) == looks
        disks.was_given_up.clear()
        await rig.advance(RECHECK_S)
        await disks.was_given_up.wait()
        await settled(rig)
    await rig.engine.stop(0)


async def test_a_lane_whose_check_hangs_is_left_alone_until_the_next_round(caplog, monkeypatch):
    """After three tasks of a lane."""
    monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 0.05)
    disks, work = Hanging(), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    with rig.engine.changes() as changes:
        uuids = await rig.submit_many("shrink", 9, args="hangs")
        while caplog.text.count("the admission check Hanging failed") < 3:
            changes.clear()
            await changes.wait()
    await settled(rig)
    assert disks.looked == uuids[:3]
    await rig.engine.stop(0)


async def test_a_recheck_that_hangs_delays_no_signal_for_long():
    """Some blockers are checked at the same time, and what is freed meanwhile does not wait for the others."""
    disks, work = Disks({f"/{n:02}" for n in range(RECHECKS_AT_ONCE + 2)}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    uuids = await submit_by_disk(rig, sorted(disks.full))
    await settled(rig)
    assert [await rig.state(uuid) for uuid in uuids] == [BLOCKED] * len(uuids)
    disks.slow = hanging = asyncio.Event()
    disks.looked.clear()
    await rig.advance(RECHECK_S)
    await settled(rig)
    assert disks.looked == uuids[:RECHECKS_AT_ONCE]
    disks.free("/11")
    disks.slow = asyncio.Event()
    hanging.set()
    await settled(rig)
    assert uuids[-2] in disks.looked  # the round goes on, and hangs again
    assert await rig.state(uuids[-1]) is QUEUED
    disks.slow.set()
    await settled(rig)
    assert work.began == [uuids[-1]]
    work.let_go(uuids[-1])
    await rig.engine.stop(1)


async def test_a_blocked_task_that_nobody_checks_is_started_by_hand():
    """The node that has the check runs it again, and blocks the task again; where none has it, the task starts."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=9)
    other, full = rig.record("shrink"), rig.record("shrink", args="/data")
    await MemoryStore.turn(rig.store, "elsewhere", adds=[Add([other, full])])
    await rig.store.apply([other.uuid], Block("tape", "7"))
    await rig.engine.start()
    await settled(rig)
    assert [await rig.state(record.uuid) for record in (other, full)] == [BLOCKED, BLOCKED]
    await rig.engine.apply([other.uuid, full.uuid], StartNow())
    await settled(rig)
    assert work.began == [other.uuid]
    assert disks.looked.count(full.uuid) == 2
    assert (await rig.found(full.uuid)).blocked_by == "disk:/data"
    work.let_go(other.uuid)
    await rig.engine.stop(1)


async def test_a_signal_that_means_nothing_is_told_and_others_count(caplog):
    """Freed with a name that no task can wait for, a blocker is ignored; the next signal is carried out."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work)
    await rig.engine.start()
    uuid = await rig.submit("shrink", args="/data")
    await settled(rig)
    disks.freed("disk", "")
    disks.freed("disk", 7)  # type: ignore[arg-type]
    disks.free("/data")
    await settled(rig)
    assert work.began == [uuid]
    assert caplog.text.count("freed what no task can wait for") == 2
    work.let_go(uuid)
    await rig.engine.stop(1)


async def test_others_start_while_very_many_are_freed():
    """A node that starts, and frees what an earlier one blocked, does not make other tasks wait for the end of that."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=50)
    await rig.engine.start()
    await rig.submit_many("shrink", 60, args="/data")
    await settled(rig)
    await rig.engine.stop(0)
    held = asyncio.Event()
    other = Rig(rig.store, rig.clock, checks=(Disks(),))
    other.consumer("shrink", work, concurrency=50)
    other.consumer("quick", work)
    apply = rig.store.apply

    async def hold(*args: Any, **more: Any) -> Any:
        await held.wait()
        return await apply(*args, **more)

    rig.store.apply = hold  # type: ignore[method-assign]
    await other.engine.start()
    uuid = await other.submit("quick")
    await settled(other)
    assert uuid in work.began
    held.set()
    for began in work.began:
        work.let_go(began)
    await other.engine.stop(0)


async def test_a_blocker_that_is_freed_while_its_tasks_are_freed_counts_again():
    """A disk that fills and is free again meanwhile leaves no task behind."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work, concurrency=99)
    await rig.engine.start()
    uuids = await rig.submit_many("shrink", 10, args="/data")
    await settled(rig)
    apply, again = rig.store.apply, [True]

    async def fill_and_free(*args: Any, **more: Any) -> Any:
        applied = await apply(*args, **more)
        if isinstance(args[1], Unblock) and again:
            again.clear()
            disks.full.add("/data")
            await apply(uuids, Block("disk", "/data"))
            disks.free("/data")
        return applied

    rig.store.apply = fill_and_free  # type: ignore[method-assign]
    disks.free("/data")
    await settled(rig)
    await settled(rig)
    assert sorted(work.began) == sorted(uuids)
    for uuid in uuids:
        work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_blocker_that_is_freed_before_it_is_stored_blocks_nothing():
    """The signal may come between the answer of the check and the write: the task goes on at once."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    rig.consumer("shrink", work)
    await rig.engine.start()
    apply, freed = rig.store.apply, [True]

    async def free_first(*args: Any, **more: Any) -> Any:
        if isinstance(args[1], Block) and freed:
            freed.clear()
            disks.free("/data")
            for _ in range(10):
                await asyncio.sleep(0)  # the signal arrives
        return await apply(*args, **more)

    rig.store.apply = free_first  # type: ignore[method-assign]
    uuid = await rig.submit("shrink", args="/data")
    await settled(rig)
    await settled(rig)
    assert work.began == [uuid]
    work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_blocker_is_checked_for_each_consumer():
    """The oldest task that waits may belong to a consumer that no node serves: another of ours is checked."""
    disks, work = Disks({"/data"}), Work()
    rig = rig_with(disks)
    for name in ("gone", "here"):
        rig.consumer(name, work)
    await rig.engine.start()
    await rig.submit("gone", args="/data")
    uuid = await rig.submit("here", args="/data")
    await settled(rig)
    await rig.engine.stop(0)
    other = Rig(rig.store, rig.clock, checks=(Disks(),))
    other.consumer("here", work)
    await other.engine.start()
    await settled(other)
    assert work.began == [uuid]
    work.let_go(uuid)
    await other.engine.stop(1)


async def test_a_claim_that_brings_nothing_is_not_repeated_at_once():
    """A store that gives nothing of what it showed is asked again after a pause that grows."""
    rig, work = rig_with(Disks()), Work()
    rig.consumer("shrink", work)
    await rig.engine.start()
    turn = rig.store.turn

    async def nothing(node: str, **parts: Any) -> Any:
        demand = parts.get("demand")
        return await turn(node, **{**parts, "demand": None if demand is not None and demand.only else demand})

    rig.store.turn = nothing  # type: ignore[method-assign]
    uuid = await rig.submit("shrink")
    await settled(rig)
    turns = rig.store.turns
    await settled(rig)
    await settled(rig)
    assert rig.store.turns - turns <= 2
    rig.store.turn = turn  # type: ignore[method-assign]
    await rig.advance(2)
    await settled(rig)
    assert work.began == [uuid]
    work.let_go(uuid)
    await rig.engine.stop(1)


async def test_a_place_that_goes_while_the_store_is_away_gets_no_task():
    """What was admitted is judged again after an outage."""
    rig, work = Rig(), Work()
    places = Places(["a"])
    rig.consumer("daily", work, places=places)
    await rig.engine.start()
    await settled(rig)
    rig.store.away = StoreUnavailable("away")
    await MemoryStore.turn(rig.store, "elsewhere", adds=[Add([record := rig.record("daily")])])
    rig.store.hint()
    await settled(rig)
    places.remove("a")
    rig.store.away = None
    for _ in range(3):
        await rig.advance(2)
        await settled(rig)
    assert work.began == []
    places.add("b")
    await settled(rig)
    assert (await rig.found(record.uuid)).device == "b"
    work.let_go(record.uuid)
    await rig.engine.stop(1)


async def test_consumers_may_share_their_places():
    """Two consumers on one set of places never run two tasks at one of them."""
    rig, work, gpus = Rig(), Work(), Places(["gpu-0"])
    for name in ("train", "infer"):
        rig.consumer(name, work, places=gpus)
    await rig.engine.start()
    uuids = [await rig.submit(name) for name in ("train", "infer", "train")]
    for n, uuid in enumerate(uuids, 1):
        await settled(rig)
        assert work.began == uuids[:n]
        work.let_go(uuid)
        await rig.outcome(uuid)
    assert work.most_at_once == 1
    await rig.engine.stop(1)


async def test_a_consumer_that_is_registered_again_gets_no_place_that_is_taken():
    """A place where a run of the earlier consumer goes on is taken, also for others that share the new places."""
    rig, work = Rig(), Work()
    rig.consumer("train", work, places=Places(["gpu-0"]))
    await rig.engine.start()
    uuids = [await rig.submit("train")]
    await settled(rig)
    del rig.consumers["train"]
    rig.engine.consumers_changed()
    gpus = Places(["gpu-0"])
    for name in ("train", "infer"):
        rig.consumer(name, work, places=gpus)
    uuids += [await rig.submit(name) for name in ("train", "infer")]
    for n, uuid in enumerate(uuids, 1):
        await settled(rig)
        assert work.began == uuids[:n]
        work.let_go(uuid)
        await rig.outcome(uuid)
    assert work.most_at_once == 1
    await rig.engine.stop(1)


async def test_lanes_of_a_consumer_with_places_share_the_room_of_its_executor():
    """With two threads two tasks are claimed, though the places and the lanes are more."""
    rig, gate = Rig(threads=2), threading.Event()
    rig.consumer("daily", lambda record: gate.wait(10), places=phones("eu", "eu", "us", "us"))
    await rig.engine.start()
    uuids = [added.uuid for added in await rig.offer(*[rig.record("daily", requires=role) for role in (EU, US) * 2])]
    await settled(rig)
    assert [await rig.state(uuid) for uuid in uuids] == [RUNNING, RUNNING, QUEUED, QUEUED]
    gate.set()
    for uuid in uuids:
        await rig.outcome(uuid)
    await rig.engine.stop(1)


def test_a_place_is_added_as_it_is_to_be():
    """A place that is added as not ready is not ready for a moment, on whatever thread."""
    places, seen = Places(), []
    places.subscribe(lambda: seen.append([place.name for place in places.ready()]))
    places.add("a", is_ready=False)
    places.add("b")
    places.add(Place("a", {"role": "eu"}), is_ready=False)
    assert seen == [[], ["b"], ["b"]]


# --- the ends of checks and places ------------------------------------------------------------------------------------


async def test_nodes_share_a_check_until_each_has_stopped():
    """Each node gets the signals of a check that several share, and disconnects when it stops."""
    disks, work = Disks({"/data"}), Work()
    rigs = [rig_with(disks), rig_with(disks)]
    uuids = []
    for rig in rigs:
        rig.consumer("shrink", work)
        await rig.engine.start()
        uuids.append(await rig.submit("shrink", args="/data"))
        await settled(rig)
    disks.free("/data")
    for rig in rigs:
        await settled(rig)
    assert work.began == uuids
    for rig, uuid, left in zip(rigs, uuids, (1, 0), strict=True):
        work.let_go(uuid)
        await rig.engine.stop(1)
        assert len(disks.connected) == left


async def test_a_start_that_fails_leaves_nothing_behind():
    """When a node cannot join, its checks are disconnected and its places are not followed."""
    disks, places = Disks(), Places(["gpu-0"])
    rig = rig_with(disks)
    rig.consumer("train", Work(), places=places)
    rig.store.refuses_nodes = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await rig.engine.start()
        rig.engine.consumers_changed()
        assert (disks.connected, places._listeners) == ([], [])


class NoEnd(Disks):
    """A check that nothing can end."""

    def connect(self, freed: Callable[[str, str], None]) -> Callable[[], None]:
        return None  # type: ignore[return-value]


async def test_a_check_that_cannot_be_disconnected_is_refused():
    """The node does not start, says what is missing, and disconnects the other checks."""
    disks = Disks()
    with pytest.raises(InvalidInput, match="NoEnd must return a function that disconnects, not None"):
        await Rig(checks=(disks, NoEnd())).engine.start()
    assert disks.connected == []


async def test_a_check_that_fails_to_disconnect_is_logged(caplog):
    """The others are disconnected all the same, and the node stops."""
    first, last = Disks(), Disks()
    rig = Rig(checks=(first, last))
    await rig.engine.start()
    last.connected.clear()  # removing it again fails
    await rig.engine.stop(1)
    assert first.connected == []
    assert "an admission check could not be disconnected" in caplog.text
