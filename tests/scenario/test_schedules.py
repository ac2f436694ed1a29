"""Recurring schedules as a user writes them, in code and at run time."""

import asyncio
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import apsw
import pytest

from taskyard import BaseTaskConsumer, Cron, Every, InvalidInput, Missed, Overlap, Task, TaskState, Yard
from taskyard.errors import InvalidArguments, ScheduleExists, UnknownConsumer, UnknownSchedule
from taskyard.model.firing import due
from taskyard.model.schedule_state import forget
from taskyard.schedules import definition, keeper
from taskyard.scheduling.items import make_tasks
from taskyard.testing.clock import ManualClock

PATIENCE_S = 20
JANUARY = datetime(2026, 1, 1, tzinfo=UTC)


def build(url: str) -> Yard:
    yard = Yard(url)

    @yard.consumer(concurrency=9)
    async def add(a: int, b: int = 1) -> int:
        return a + b

    return yard


async def fired(yard: Yard, name: str, count: int) -> list[str]:
    """Wait until so many of its tasks have ended; their ids, the first one first."""
    async with asyncio.timeout(PATIENCE_S):
        with yard._engine.changes() as changes:
            while True:
                changes.clear()
                rows = await yard.schedules.list_fires(name, limit=1_000)
                outcomes = await yard.store.outcomes([row.task for row in rows])
                if sum(outcome is not None and outcome.state is TaskState.COMPLETED for outcome in outcomes) >= count:
                    return [row.task for row in rows][::-1]
                await changes.wait()


@pytest.mark.spec("SCH-21")
async def test_a_schedule_of_the_code_fires(url):
    """A consumer with a schedule above it runs by itself, with the arguments given, as soon as the yard is open."""
    yard = build(url)

    @yard.schedule(1, args={"name": "you"})
    @yard.consumer(queue="cpu")
    async def greet(name: str) -> str:
        return f"hello {name}"

    async with yard:
        tasks = await fired(yard, "greet", 2)
        assert await yard.handle(tasks[0]).result() == "hello you"
        assert (await yard.handle(tasks[0]).record()).queue == "cpu"
        status = await yard.schedules.get("greet")
        assert status.from_code
        assert status.state.fired >= 2


@pytest.mark.spec("SCH-21")
async def test_a_schedule_is_added_while_the_yard_is_open(url):
    """It fires from then on; another definition takes its place, and it ends when it is removed."""
    async with build(url) as yard:
        status = await yard.schedules.add("often", Every(1), "add", {"a": 1}, overlap="allow")
        assert (definition(status).overlap, status.state.fired) == (Overlap.ALLOW, 0)
        await fired(yard, "often", 1)
        status = await yard.schedules.add("often", "@yearly", "add", {"a": 2}, zone="Asia/Tokyo")
        assert definition(status).rule == Cron("@yearly", "Asia/Tokyo")
        assert status.state.fired >= 1
        (upcoming,) = await yard.schedules.next_fires(status, count=1)
        assert (upcoming.month, upcoming.day, upcoming.hour) == (12, 31, 15)
        await yard.schedules.remove("often")
        assert await yard.schedules.list_all() == []
        with pytest.raises(UnknownSchedule, match="no schedule 'often'"):
            await yard.schedules.remove("often")


@pytest.mark.spec("SCH-21")
async def test_the_same_code_started_again_goes_on_where_it_was(file_url, caplog):
    """Neither counters nor a pause are lost when the program starts anew; a changed rule counts from then on, and is
    told of: it may be another program's."""

    def program(rule: Any) -> Yard:
        yard = build(file_url)
        yard.schedules.define("job", rule, "add", {"a": 1})
        return yard

    async with program(1) as yard:
        await fired(yard, "job", 1)
        await yard.schedules.pause("job", note="for now", by="ann")
    async with program(1) as yard:
        first = await yard.schedules.get("job")
        assert (first.state.note, first.state.paused_by) == ("for now", "ann")
        assert first.state.fired >= 1
        assert await yard.schedules.next_fires(first) == []
    assert "defined anew" not in caplog.text
    async with program(3600) as yard:
        assert "schedule job is defined anew" in caplog.text
        second = await yard.schedules.get("job")
        assert definition(second).rule == Every(3600)
        assert second.state.fired == first.state.fired
        assert second.state.paused_at == first.state.paused_at
        assert second.version != first.version
    async with program(3600) as yard:
        assert (await yard.schedules.get("job")).version == second.version


@pytest.mark.spec("SCH-21")
async def test_who_only_submits_defines_nothing(file_url):
    """A client leaves the schedules to those who run them, but can steer what is there."""
    yard = build(file_url)
    yard.schedules.define("job", "@daily", "add", {"a": 1})
    async with yard.client():
        assert await yard.schedules.list_all() == []
        await yard.schedules.add("other", "@daily", "add", {"a": 1})
        await yard.schedules.pause("other")
        assert [status.name for status in await yard.schedules.list_all()] == ["other"]


@pytest.mark.spec("SCH-21")
async def test_a_schedule_is_paused_and_resumed(url):
    """Paused it fires nothing, also not what comes due meanwhile; run now works all the same."""
    async with build(url) as yard:
        await yard.schedules.add("often", 1, "add", {"a": 1})
        await fired(yard, "often", 1)
        paused = await yard.schedules.pause("often", note="quiet")
        before = len(await yard.schedules.list_fires("often"))
        handle = await yard.schedules.run_now("often")
        assert await handle.result(timeout_s=PATIENCE_S) == 2
        rows = await yard.schedules.list_fires("often")
        assert (len(rows), rows[0].kind, rows[0].task) == (before + 1, "by hand", handle.uuid)
        resumed = await yard.schedules.resume("often")
        assert (resumed.state.paused_at, resumed.state.note) == (None, "")
        assert resumed.state.fired == paused.state.fired
        await fired(yard, "often", before + 2)


@pytest.mark.spec("SCH-21")
async def test_a_backfill_fires_each_time_once(url):
    """A task for every day of the range, from its start on and before its end, and for none twice."""
    async with build(url) as yard:
        await yard.schedules.add("daily", "0 4 * * *", "add", {"a": 1}, zone="Europe/Berlin")
        week = (JANUARY, JANUARY + timedelta(days=7))
        handles = await yard.schedules.backfill("daily", *week)
        assert [await handle.result(timeout_s=PATIENCE_S) for handle in handles] == [2] * 7
        rows = await yard.schedules.list_fires("daily")
        assert [row.fire_at for row in rows[::-1]] == [JANUARY + timedelta(days=n, hours=3) for n in range(7)]
        assert await yard.schedules.backfill("daily", *week) == []
        more = await yard.schedules.backfill("daily", JANUARY, JANUARY + timedelta(days=9))
        assert len(more) == 2
        assert (await yard.schedules.get("daily")).state.fired == 0
        with pytest.raises(InvalidInput, match="take less at a time"):
            await yard.schedules.backfill("daily", JANUARY, JANUARY + timedelta(days=9), limit=5)


@pytest.mark.spec("SCH-16", "SCH-21")
async def test_what_a_clock_that_was_ahead_has_fired_is_not_announced(url):
    """Three hours are fired too early; when the clock is right again they are not told to fire next, nor are those that
    lie before a moment that the schedule is ahead by."""
    clock = ManualClock(JANUARY)
    yard = Yard(url, clock=clock)

    @yard.consumer
    async def job() -> None: ...

    hours = [JANUARY + timedelta(hours=n) for n in range(10)]
    async with yard.client():
        status, store = await yard.schedules.add("job", 3600, job, missed="all", overlap="allow"), keeper(yard.store)
        assert await yard.schedules.next_fires(status, count=2) == hours[1:3]
        clock.step(3 * 3600 + 60)
        plan = due(definition(status), status.state, now=clock.now(), is_busy=False)
        made = await make_tasks(definition(status), job.consumer, plan.fires, None, now=clock.now())
        await store.fire("job", version=status.version, state=plan.state, fires=made)
        clock.step(-3 * 3600)
        ahead = await yard.schedules.get("job")
        assert await yard.schedules.next_fires(ahead, count=3) == hours[4:7]
        clock.step(3 * 3600 - 61)
        assert await yard.schedules.next_fires(ahead, count=1) == hours[4:5]


async def test_run_now_makes_a_task_each_time():
    """Also on a clock that stands still, and at a time at which the rule fires itself."""
    yard = Yard("memory://", clock=ManualClock(JANUARY))

    @yard.consumer
    async def job() -> None: ...

    async with yard:
        await yard.schedules.add("job", 60, job)
        await yard.schedules.backfill("job", JANUARY - timedelta(seconds=60), JANUARY)
        made = [await yard.schedules.run_now("job") for _ in range(5)]
        assert len({handle.uuid for handle in made}) == 5
        assert {(await handle.record()).due_at for handle in made} == {JANUARY}


@pytest.mark.spec("SCH-21")
async def test_a_backfill_of_times_that_are_forgotten_is_asked_for_twice(url):
    """Times that may have fired, of which the store knows no more, fire only if that is said."""
    async with build(url) as yard:
        await yard.schedules.add("daily", "@daily", "add", {"a": 1})
        status, store = await yard.schedules.get("daily"), keeper(yard.store)
        await store.fire("daily", version=status.version, state=forget(status.state, JANUARY))
        with pytest.raises(InvalidInput, match="not known any more"):
            await yard.schedules.backfill("daily", JANUARY, JANUARY + timedelta(days=2))
        assert (
            len(await yard.schedules.backfill("daily", JANUARY + timedelta(days=1), JANUARY + timedelta(days=2))) == 1
        )
        assert len(await yard.schedules.backfill("daily", JANUARY, JANUARY + timedelta(days=2), again=True)) == 1


@pytest.mark.spec("SCH-17", "SCH-21")
async def test_two_yards_on_a_store_fire_once(file_url):
    """With two yards that serve it, each second becomes one task."""
    one, two = build(file_url), build(file_url)
    async with one, two:
        await two.schedules.add("often", 1, "add", {"a": 1}, overlap="allow", missed="all")
        await fired(one, "often", 3)
        await two.schedules.pause("often")
        rows = await one.schedules.list_fires("often", limit=100)
        times = [row.fire_at for row in rows]
        assert len(set(times)) == len(times) == sum((await one.store.count()).values())
        assert max(times) - min(times) == timedelta(seconds=len(times) - 1)


@pytest.mark.spec("SCH-21")
async def test_a_class_makes_its_task_each_time(url):
    """What `produce` makes of the arguments is asked for at every fire."""
    made: list[dict[str, Any]] = []

    class Report(BaseTaskConsumer):
        name = "report"

        def produce(self, args: dict[str, Any]) -> Task:
            made.append(args)
            return Task(source=self.name, args={**args, "number": len(made)})

        async def consume(self, task: Task) -> int:
            return int(task.args["number"])

    yard = Yard(url)
    yard.register(Report())
    async with yard:
        await yard.schedules.add("reports", 1, "report", {"kind": "short"})
        tasks = await fired(yard, "reports", 2)
        assert [await yard.handle(task).result() for task in tasks[:2]] == [1, 2]
    assert made[0] == {"kind": "short"}


def test_what_is_wrong_with_a_schedule_is_told_where_it_is_written():
    """Bad rules, arguments, names and settings are refused by the definition itself, with words that help."""
    yard = build("memory://")
    with pytest.raises(InvalidInput, match="has 3 fields, not 5"):
        yard.schedules.define("x", "* * *", "add", {"a": 1})
    with pytest.raises(InvalidArguments):
        yard.schedules.define("x", "@daily", "add", {"a": "no"})
    with pytest.raises(UnknownConsumer):
        yard.schedules.define("x", "@daily", "nobody")
    with pytest.raises(InvalidInput, match="unknown setting missing of a schedule; known are zone, queue"):
        yard.schedules.define("x", "@daily", "add", {"a": 1}, missing="skip")
    with pytest.raises(InvalidInput, match="missed 'maybe' is not one of skip, once, all"):
        yard.schedules.define("x", "@daily", "add", {"a": 1}, missed="maybe")
    yard.schedules.define("x", timedelta(minutes=5), "add", {"a": 1}, missed=Missed.ALL)
    with pytest.raises(ScheduleExists):
        yard.schedules.define("x", "@daily", "add", {"a": 1})
    with pytest.raises(InvalidInput, match=r"put @yard\.schedule above @yard\.consumer"):
        yard.schedule("@daily")(print)  # type: ignore[arg-type]


async def test_what_code_defines_is_changed_there(file_url):
    """A schedule of a program is not changed at run time: the next start would change it back."""
    yard = build(file_url)
    yard.schedules.define("job", "@daily", "add", {"a": 1})
    async with yard:
        with pytest.raises(ScheduleExists, match="change it there"):
            await yard.schedules.add("job", "@hourly", "add", {"a": 1})
        with pytest.raises(InvalidInput, match="before the yard is opened"):
            yard.schedules.define("late", "@daily", "add", {"a": 1})


async def test_a_schedule_that_cannot_be_read_is_shown_and_can_be_removed(file_url, tmp_path):
    """One of a newer program, or with a zone that is not known here, is listed with what is wrong with it."""
    async with build(file_url) as yard:
        await yard.schedules.add("odd", "@daily", "add", {"a": 1})
    with closing(apsw.Connection(str(tmp_path / "work.db"))) as conn:
        conn.execute("UPDATE schedule SET definition = replace(definition, 'UTC', 'Mars/Olympus')")
    async with build(file_url) as yard:
        status = await yard.schedules.get("odd")
        assert status.schedule is None
        assert "Mars/Olympus" in status.problem
        with pytest.raises(InvalidInput, match="cannot be read here"):
            await yard.schedules.run_now("odd")
        await yard.schedules.pause("odd")
        await yard.schedules.remove("odd")


BROKEN_STATES = ["{", "[]", '{"watermark_at": 5}', '{"watermark_at": "2026-01-01T00:00:00"}']


@pytest.mark.parametrize("state", BROKEN_STATES)
async def test_a_state_that_cannot_be_read_concerns_its_schedule_alone(file_url, tmp_path, state):
    """It is listed with what is wrong with it, the others fire, and it is put right by a new definition."""
    async with build(file_url) as yard:
        await yard.schedules.add("odd", "@daily", "add", {"a": 1})
        await yard.schedules.add("sound", 1, "add", {"a": 1})
    with closing(apsw.Connection(str(tmp_path / "work.db"))) as conn:
        conn.execute("UPDATE schedule SET state = ? WHERE name = 'odd'", (state,))
    async with build(file_url) as yard:
        await fired(yard, "sound", 2)
        odd, sound = await yard.schedules.list_all()
        assert (odd.schedule, sound.problem) == (None, "")
        assert odd.problem
        for refused in (yard.schedules.pause("odd"), yard.schedules.resume("odd"), yard.schedules.run_now("odd")):
            with pytest.raises(InvalidInput, match="cannot be read here"):
                await refused
        assert (await yard.schedules.add("odd", "@daily", "add", {"a": 2})).problem == ""
        assert (await yard.schedules.pause("odd")).state.missed == 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda on: on.pause("job", by=5),
        lambda on: on.pause("job", by="a\0"),
        lambda on: on.pause("job", note=5),
        lambda on: on.pause(5),
        lambda on: on.resume(None),
        lambda on: on.remove(5),
        lambda on: on.get(["job"]),
        lambda on: on.run_now(5),
        lambda on: on.list_fires("job", limit="all"),
        lambda on: on.backfill("job", "yesterday", "today"),
        lambda on: on.put("x"),
        lambda on: on.add("x", 60, "add", {"a": 1}, by=5),
        lambda on: on.add(5, 60, "add", {"a": 1}),
        lambda on: on.add("x", None, "add", {"a": 1}),
        lambda on: on.add("x", "@daily", "add", {"a": 1}, zone=5),
        lambda on: on.add("x", 60, 5, {"a": 1}),
        lambda on: on.add("x", 60, "add", 5),
        lambda on: on.add("x", 60, "add", {"a": 1}, retry=5),
    ],
)
async def test_what_is_asked_is_checked_before_it_is_stored(url, ask):
    """Whatever is wrong with what a person asks is told, and the schedules are as they were."""
    async with build(url) as yard:
        before = await yard.schedules.add("job", "@yearly", "add", {"a": 1})
        with pytest.raises(InvalidInput):
            await ask(yard.schedules)
        assert await yard.schedules.list_all() == [before]
