"""Schedules on a node, or on two, on a clock that the test moves and sets."""

import asyncio
import logging
from collections import Counter
from datetime import UTC, datetime

import pytest

from taskyard.cluster.leader import Leadership, find_leader
from taskyard.errors import StoreUnavailable
from taskyard.model.firing import FireKind
from taskyard.model.node import Node, NodeStatus
from taskyard.model.recurrence import Cron, Every, Rule, fires_between
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.schedule_state import ScheduleState
from taskyard.model.state import TaskState
from taskyard.ports.schedules import ScheduleStatus
from taskyard.schedules import put
from taskyard.scheduling.recurring import HINTED_S
from taskyard.testing.clock import START, ManualClock
from taskyard.testing.samples import seconds
from tests.engine.support import Rig, ShakyStore, Work, quiet

HOUR, DAY = 3_600, 86_400


class ScheduleShakyStore(ShakyStore):
    """A store that also fails to say which schedules there are, or has one that nobody can read."""

    has_broken = False
    fire_unanswered = False

    async def schedules(self, name=None):
        if self.away is not None:
            raise self.away
        broken = ScheduleStatus(
            name="broken", schedule=None, state=ScheduleState.begin(START), version="1", problem="no such zone"
        )
        return ([broken] if self.has_broken and name is None else []) + await super().schedules(name)

    async def fire(self, name, **parts):
        fired = await super().fire(name, **parts)
        if self.fire_unanswered:
            self.fire_unanswered = False
            raise StoreUnavailable("the connection broke")
        return fired


async def schedule(rig: Rig, rule: Rule | None = None, *, name: str = "s", source: str = "job", **settings) -> Schedule:
    made = Schedule(name=name, rule=rule or Every(60), consumer=source, **settings)
    await put(rig.store, made, now=rig.clock.now(), by="test")
    rig.engine.look_at_schedules()
    rig.store.hint()
    await rig.advance(0)
    return made


async def fires(rig: Rig, name: str = "s") -> list[datetime]:
    """What has fired, in the order of the times, each as often as there are tasks for it."""
    rows = {row.task: row.fire_at for row in await rig.store.list_fires(name, limit=100_000)}
    tasks = [record.uuid for record in await rig.store.list_tasks(limit=100_000)]
    return sorted(rows[task] for task in tasks if task in rows)


async def pass_time(rig: Rig, total: float, by: float = 1.0) -> None:
    for _ in range(round(total / by)):
        await rig.advance(by)


@pytest.fixture
async def make(start_rig):
    """Nodes that run `job`, all on one store and one clock."""
    clocks: list[ManualClock] = []
    stores: list[ScheduleShakyStore] = []

    async def make(at: datetime = START, call=None) -> Rig:
        if not stores:
            clock = ManualClock(at)
            stores.append(ScheduleShakyStore(clock))
            clocks.append(clock)
        rig: Rig = await start_rig(store=stores[0], clock=clocks[0])

        async def job(record) -> None: ...

        rig.consumer("job", call or job, concurrency=100)
        return rig

    return make


# --- one node ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
async def test_a_schedule_fires_at_its_times(make):
    """Every fire time becomes one task, which runs; in between nothing happens."""
    rig = await make()
    await schedule(rig)
    await pass_time(rig, 59)
    assert await fires(rig) == []
    await pass_time(rig, 121)
    assert await fires(rig) == [START + seconds(n) for n in (60, 120, 180)]
    assert {record.state for record in await rig.store.list_tasks()} == {TaskState.COMPLETED}
    (status,) = await rig.store.schedules()
    assert (status.state.fired, status.state.missed, status.state.skipped) == (3, 0, 0)


@pytest.mark.spec("SCH-21")
async def test_a_task_is_as_the_schedule_says(make):
    """Queue, priority, key, arguments and timeout are those of the schedule, and else those of the consumer."""
    rig = await make()
    rig.consumer("other", rig.consumers["job"].call, queue="cpu", timeout_s=5.0)
    await schedule(rig, source="other", args='{"a":1}', key="k", priority="high", timeout_s=9.0)
    await pass_time(rig, 60)
    (task,) = await rig.store.list_tasks()
    assert (task.queue, task.priority, task.key, task.args, task.timeout_s) == ("cpu", 0, "k", '{"a":1}', 5.0)


@pytest.mark.spec("SCH-07")
async def test_without_schedules_nothing_is_looked_at(make):
    """A node that has no schedules sets no timer for them, and looks again only when something has happened."""
    rig = await make()
    await quiet()
    before = rig.probes.looked.count
    await pass_time(rig, 60)
    assert rig.probes.looked.count == before
    rig.store.hint()
    await quiet()
    assert rig.probes.looked.count == before + 1


async def test_a_crowd_of_hints_leads_to_few_looks(make):
    """Where others commit all the time, schedules are looked at a few times a second."""
    rig = await make()
    await schedule(rig, Every(HOUR))
    before = rig.probes.looked.count
    for _ in range(100):
        rig.store.hint()
        await rig.advance(0.01)
    assert rig.probes.looked.count - before <= 3


async def test_many_turns_beside_a_fire_that_is_kept_back_lead_to_few_looks(make):
    """Where much runs here, a fire that waits for the end of a task is looked at a few times a second."""
    work = Work()
    rig = await make(call=work)

    async def quick(record) -> None: ...

    rig.consumer("quick", quick)
    await schedule(rig, Every(60), overlap=Overlap.BUFFER)
    await pass_time(rig, 130)
    assert (await rig.store.schedules())[0].state.buffered_at is not None
    before = rig.probes.looked.count
    for _ in range(100):
        await rig.submit("quick")
        await rig.advance(0.01)
    assert rig.probes.looked.count - before <= 3


@pytest.mark.spec("SCH-21")
async def test_what_was_missed_while_nobody_was_there_is_made_up_for(make):
    """A node that comes back after two hours fires as the schedule says of missed runs: none, one, or all."""
    rig = await make()
    for name in Missed:
        await schedule(rig, Every(600), name=name, missed=name, overlap=Overlap.ALLOW, catch_up_s=HOUR)
    rig.clock.step(2 * HOUR + 300)
    await pass_time(rig, 5)
    rows = {name: await rig.store.list_fires(name, limit=100) for name in Missed}
    assert {name: len(found) for name, found in rows.items()} == {"skip": 0, "once": 1, "all": 6}
    assert rows[Missed.ONCE][0].fire_at == START + seconds(2 * HOUR)
    assert rows[Missed.ONCE][0].kind is FireKind.CAUGHT_UP


@pytest.mark.spec("SCH-21")
async def test_a_run_that_is_kept_back_begins_when_the_one_before_ends(make):
    """With `buffer`, one fire time waits for the end of the task, and becomes one soon after; others are skipped."""
    work = Work()
    rig = await make(call=work)
    await schedule(rig, overlap=Overlap.BUFFER)
    await pass_time(rig, 240)
    assert len(work.began) == 1
    work.let_go(work.began[0])
    await rig.advance(HINTED_S)
    assert len(work.began) == 2
    rows = await rig.store.list_fires("s")
    assert [(row.fire_at, row.kind) for row in rows] == [
        (START + seconds(120), FireKind.BUFFERED),
        (START + seconds(60), FireKind.ON_TIME),
    ]
    (status,) = await rig.store.schedules()
    assert (status.state.fired, status.state.skipped) == (2, 2)


@pytest.mark.spec("SCH-21")
async def test_overlap_decides_what_becomes_of_a_task_that_still_runs(make):
    """With `skip` the new one is skipped, with `cancel` the old one is canceled, with `allow` both run."""
    work = Work()
    rig = await make(call=work)
    for name in (Overlap.SKIP, Overlap.CANCEL, Overlap.ALLOW):
        await schedule(rig, name=name, overlap=name)
    await pass_time(rig, 120)
    rows = {name: [row.task for row in await rig.store.list_fires(name)] for name in ("skip", "cancel", "allow")}
    assert {name: len(found) for name, found in rows.items()} == {"skip": 1, "cancel": 2, "allow": 2}
    assert work.cancelled == rows["cancel"][1:]
    assert await rig.state(rows["cancel"][1]) is TaskState.CANCELED


async def test_a_long_catch_up_comes_in_batches(make):
    """Of hundreds of fires that are made up for, none is lost, and none comes twice."""
    rig = await make()
    await schedule(rig, missed=Missed.ALL, overlap=Overlap.ALLOW)
    rig.clock.step(6 * HOUR)
    await pass_time(rig, 10)
    assert await fires(rig) == [START + seconds(60 * n) for n in range(1, 361)]


async def test_a_store_that_is_away_is_tried_again(make, caplog):
    """Fires that came due while the store was away are made when it is back; that is told once."""
    rig = await make()
    await schedule(rig)
    await pass_time(rig, 58)
    rig.store.away = StoreUnavailable("gone")
    await pass_time(rig, 30)
    rig.store.away = None
    await pass_time(rig, 5)
    assert await fires(rig) == [START + seconds(60)]
    assert [record.message for record in caplog.records].count("cannot look for schedules that are due: gone") == 1


async def test_a_fire_without_an_answer_is_not_repeated(make):
    """If the connection breaks after the commit, the fire time has its one task all the same."""
    rig = await make()
    await schedule(rig)
    rig.store.fire_unanswered = True
    await pass_time(rig, 70)
    assert await fires(rig) == [START + seconds(60)]


async def test_one_bad_schedule_does_not_stop_the_others(make, caplog):
    """One that cannot be read, one of a consumer that nobody has and one whose code fails are told of once each."""
    rig = await make()

    def produce(args):
        raise ValueError("produce fails")

    rig.consumer("picky", rig.consumers["job"].call, produce=produce)
    rig.store.has_broken = True
    await schedule(rig, name="a", source="nobody")
    await schedule(rig, name="b", source="picky")
    await schedule(rig, name="s")
    with caplog.at_level(logging.ERROR, "taskyard"):
        await pass_time(rig, 180)
    told = Counter(record.args[0] for record in caplog.records if "does not fire" in record.message)
    assert told == {"broken": 1, "a": 1, "b": 1}
    assert len(await rig.store.list_fires("s")) == 3
    rig.consumer("nobody", rig.consumers["job"].call)
    await pass_time(rig, 3)
    assert [row.fire_at for row in await rig.store.list_fires("a")] == [START + seconds(180)]


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-16", "SCH-21")
@pytest.mark.parametrize("step_s", [HOUR, -HOUR, DAY, -DAY, 40, -40])
@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.ALLOW])
@pytest.mark.parametrize("missed", Missed)
async def test_a_clock_that_steps_fires_nothing_twice_and_loses_nothing(make, step_s, overlap, missed):
    """Set wrong by up to a day for five minutes, either way, and set right again: no fire time has two tasks, and all
    have one that come while the clock is right; of those five that do not, it is as with any that are missed."""
    rig = await make()
    await schedule(rig, missed=missed, overlap=overlap)
    await pass_time(rig, 150)
    rig.clock.step(step_s)
    await pass_time(rig, 300)
    rig.clock.step(-step_s)
    await pass_time(rig, 300)
    found = await fires(rig)
    assert len(found) == len(set(found)) == len(await rig.store.list_tasks(limit=100_000))
    lost = set(fires_between(Every(60), after=START, until=START + seconds(750))) - set(found)
    unseen = {START + seconds(n) for n in range(180, 450, 60)}
    assert lost <= unseen
    if missed is Missed.ALL and overlap is Overlap.ALLOW:
        assert not lost
    if missed is Missed.ONCE and step_s < 0:
        assert START + seconds(420) in found  # makes up for the others


@pytest.mark.spec("SCH-16", "SCH-21")
@pytest.mark.parametrize("missed", Missed)
async def test_a_clock_set_back_fires_nothing_of_before_the_schedule(make, missed):
    """An hour back for a few seconds, again and again: nothing fires of before it was added, or was paused, and the
    counters do not count it."""
    rig = await make()
    await schedule(rig, missed=missed, overlap=Overlap.ALLOW)
    for _ in range(5):
        rig.clock.step(-HOUR)
        await pass_time(rig, 5)
        rig.clock.step(HOUR)
        await pass_time(rig, 5)
    assert await fires(rig) == []
    (status,) = await rig.store.schedules()
    assert (status.state.fired, status.state.missed, status.state.skipped) == (0, 0, 0)
    await pass_time(rig, 40)
    assert await fires(rig) == [START + seconds(60)]


@pytest.mark.spec("SCH-16", "SCH-21")
async def test_a_clock_set_far_back_repeats_nothing_that_is_forgotten(make):
    """Of a schedule that fires so often that its first fire times are forgotten, none fires again either."""
    rig = await make()
    await schedule(rig, Every(1), overlap=Overlap.ALLOW, missed=Missed.ALL)
    rig.clock.step(HOUR)
    await pass_time(rig, 120)
    assert len(await fires(rig)) < len(await rig.store.list_tasks(limit=10_000)) == HOUR + 120
    rig.clock.step(-HOUR)
    await pass_time(rig, 300)
    assert len(await rig.store.list_tasks(limit=10_000)) == HOUR + 120
    rig.clock.step(HOUR)
    await pass_time(rig, 120)
    assert len(await rig.store.list_tasks(limit=10_000)) == HOUR + 540


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("begin", "wanted"),
    [
        pytest.param(datetime(2026, 3, 28, 20, tzinfo=UTC), datetime(2026, 3, 29, 1, 0, tzinfo=UTC), id="leap"),
        pytest.param(datetime(2026, 10, 24, 20, tzinfo=UTC), datetime(2026, 10, 25, 0, 30, tzinfo=UTC), id="back"),
    ],
)
async def test_a_change_of_clocks_neither_adds_nor_takes_a_run(make, begin, wanted):
    """02:30 in Berlin fires once on the day that has none, and once on the day that has two."""
    rig = await make(at=begin)
    await schedule(rig, Cron("30 2 * * *", "Europe/Berlin"))
    await pass_time(rig, 12 * HOUR, by=30)
    assert await fires(rig) == [wanted]


@pytest.mark.spec("SCH-16")
async def test_a_machine_that_slept_makes_up_for_what_it_missed(make):
    """After a suspend, when the wall clock has gone on and the other has not, one run makes up for the night."""
    rig = await make()
    await schedule(rig, Every(HOUR), overlap=Overlap.ALLOW)
    rig.clock.step(8 * HOUR + 1_800)
    await pass_time(rig, 3)
    assert await fires(rig) == [START + seconds(8 * HOUR)]
    await pass_time(rig, 1_800)
    assert await fires(rig) == [START + seconds(8 * HOUR), START + seconds(9 * HOUR)]


# --- several nodes ----------------------------------------------------------------------------------------------------


def a_node(incarnation: str, started_at: datetime | None, *sources: str) -> NodeStatus:
    node = Node(incarnation=incarnation, name="n", pid=1, host="h", consumers=sources, started_at=started_at)
    return NodeStatus(node=node, running=0)


def test_the_eldest_that_serves_the_source_leads():
    """Of those that serve it the one that has been there longest, ties broken by name; if none does, of all."""
    old, young, twin = a_node("b", START, "x"), a_node("c", START + seconds(1), "job"), a_node("a", START, "x")
    assert find_leader([young, old, twin], "x") == "a"
    assert find_leader([old, young, twin], "job") == "c"
    assert find_leader([young, old, twin], "nobody") == "a"
    assert find_leader([a_node("z", None, "x"), old], "x") == "b"
    assert find_leader([], "x") is None


@pytest.mark.spec("SCH-17")
async def test_one_of_two_nodes_fires(make):
    """The elder one does all of it; the other stands by."""
    elder = await make()
    await pass_time(elder, 1)
    younger = await make()
    await schedule(younger)
    await pass_time(elder, 180)
    assert len(await fires(elder)) == 3
    assert (elder.probes.fired.count, younger.probes.fired.count) == (3, 0)


@pytest.mark.spec("SCH-17")
async def test_a_deputy_fires_what_the_leader_leaves(make):
    """If the leader is dead or stopped, somebody else fires two seconds later, and every time."""
    rig = await make()
    await rig.store.join(a_node("0", START - seconds(1), "job").node)
    await schedule(rig)
    await pass_time(rig, 61, by=0.5)
    assert await fires(rig) == []
    await pass_time(rig, 2, by=0.5)
    assert await fires(rig) == [START + seconds(60)]
    await pass_time(rig, 60, by=0.5)
    assert await fires(rig) == [START + seconds(60), START + seconds(120)]
    await rig.store.leave("0")


@pytest.mark.spec("SCH-17")
async def test_two_who_both_lead_fire_once(make, monkeypatch):
    """With every node convinced that it leads, each fire time still becomes one task."""
    monkeypatch.setattr(Leadership, "_leads", lambda *_: True)
    one, two, three = [await make() for _ in range(3)]
    await schedule(one, overlap=Overlap.ALLOW)
    await pass_time(one, 600)
    assert await fires(one) == [START + seconds(60 * n) for n in range(1, 11)]
    (status,) = await one.store.schedules()
    assert status.state.fired == 10
    assert two.probes.looked.count > 10
    assert three.probes.looked.count > 10


@pytest.mark.spec("SCH-17")
async def test_a_leader_that_leaves_is_followed_at_once(make):
    """When the leader has left, the next one leads, and fires in time."""
    elder = await make()
    await pass_time(elder, 1)
    younger = await make()
    await schedule(younger)
    await pass_time(elder, 60)
    stopping = asyncio.create_task(elder.engine.stop(grace_s=0.0))
    while not stopping.done():
        await younger.advance(0.1)
    await pass_time(younger, 120 - (younger.clock.now() - START).total_seconds(), by=0.1)
    await younger.advance(0.1)
    assert await fires(younger) == [START + seconds(60), START + seconds(120)]
    assert younger.probes.fired.count == 1
