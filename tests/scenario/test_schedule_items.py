"""Schedules that make a task for each of many items, as a user writes them."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskyard import InvalidInput, TaskState, Yard
from taskyard.errors import BatchTooLarge, InvalidArguments, ItemsFailed
from taskyard.model.each import MOST_ITEMS, ScheduleItem
from tests.scenario.transactions import by_asyncpg

PATIENCE_S = 20
ACCOUNTS = [{"account": n} for n in range(5)]


def build(url: str, gate: asyncio.Event | None = None) -> Yard:
    yard = Yard(url)

    @yard.consumer(concurrency=50)
    async def visit(account: int, level: int = 1) -> int:
        if gate is not None and account == 0:
            await gate.wait()
        return account * level

    return yard


async def rows(yard: Yard, name: str) -> list[tuple[int, int]]:
    return [(row.made, row.skipped) for row in await yard.schedules.list_fires(name)][::-1]


@pytest.mark.spec("SCH-21")
async def test_a_schedule_of_the_code_runs_each_item(url):
    """Every second a task for each account, with the arguments of the schedule beside its own."""
    yard = build(url)
    yard.schedules.define("daily", 1, "visit", {"level": 10}, each=ACCOUNTS)
    async with yard:
        async with asyncio.timeout(PATIENCE_S):
            with yard._engine.changes() as changes:
                while not (fires := await yard.schedules.list_fires("daily")):
                    changes.clear()
                    await changes.wait()
        assert (fires[-1].made, fires[-1].skipped) == (5, 0)
        assert await yard.handle(fires[-1].task).result(timeout_s=PATIENCE_S) == 0
        records = [one for one in await yard.store.list_tasks(limit=1000) if one.created_at <= fires[-1].fire_at]
        assert {record.args for record in records} <= {f'{{"account":{n},"level":10}}' for n in range(5)}


@pytest.mark.spec("SCH-21")
async def test_run_each_makes_the_tasks_of_now(url):
    """A task for each item; what is running or queued from the last time is skipped and counted."""
    gate = asyncio.Event()
    async with build(url, gate) as yard:
        await yard.schedules.add("daily", "0 4 * * *", "visit", each=ACCOUNTS)
        made = await yard.schedules.run_each("daily")
        assert (len(made.tasks), made.skipped) == (5, 0)
        results = [await handle.result(timeout_s=PATIENCE_S) for handle in made.tasks[1:]]
        assert results == [1, 2, 3, 4]
        again = await yard.schedules.run_each("daily", by="ann")
        assert (len(again.tasks), again.skipped) == (4, 1)
        gate.set()
        assert await made.tasks[0].result(timeout_s=PATIENCE_S) == 0
        assert await rows(yard, "daily") == [(5, 0), (4, 1)]
        audit = [entry for entry in await yard.store.list_audit(limit=50) if entry.command == "run_schedule"]
        assert sorted((entry.matched, entry.changed) for entry in audit) == [(5, 4)]


@pytest.mark.spec("SCH-21")
async def test_what_was_submitted_otherwise_counts_as_the_same_work(url):
    """A task of the same key, or of the same arguments, that somebody has submitted makes its item skipped."""
    gate = asyncio.Event()
    async with build(url, gate) as yard:
        items = [ScheduleItem({"account": 0}, key="zero"), {"account": 1}]
        await yard.schedules.add("daily", "0 4 * * *", "visit", each=items)
        options: dict[str, Any] = {"dedupe": "merge", "key": "zero", "dedupe_key": "zero"}
        await yard.submit("visit", {"account": 0, "level": 3}, **options)
        made = await yard.schedules.run_each("daily")
        assert (len(made.tasks), made.skipped) == (1, 1)
        gate.set()


@pytest.mark.spec("SCH-21")
async def test_an_account_that_runs_anything_is_skipped_with_key_idle(url):
    """With the scope `key_idle` a task of another consumer that runs with the key of an item is in its way."""
    gate = asyncio.Event()
    yard = build(url)

    @yard.consumer(concurrency=5)
    async def other() -> None:
        await gate.wait()

    async with yard:
        running = await yard.submit("other", key="2")
        async with asyncio.timeout(PATIENCE_S):
            with yard._engine.changes() as changes:
                while (await running.record()).state is not TaskState.RUNNING:
                    changes.clear()
                    await changes.wait()
        each = [ScheduleItem({"account": n}, key=str(n)) for n in range(5)]
        await yard.schedules.add("daily", "0 4 * * *", "visit", each=each, dedupe_scope="key_idle")
        made = await yard.schedules.run_each("daily")
        assert (len(made.tasks), made.skipped) == (4, 1)
        keys = [(await handle.record()).key for handle in made.tasks]
        assert keys == ["0", "1", "3", "4"]
        gate.set()


@pytest.mark.spec("SCH-21")
async def test_a_backfill_makes_the_tasks_of_each_time(url):
    """With `allow` a task for each item and time; with `skip` the second time finds the same work and makes none."""
    gate = asyncio.Event()
    async with build(url, gate) as yard:
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        for name, overlap in (("all", "allow"), ("some", "skip")):
            await yard.schedules.add(name, 3600, "visit", {"level": len(name)}, each=ACCOUNTS, overlap=overlap)
            made = await yard.schedules.backfill(name, now - timedelta(hours=3), now)
            assert len(made) == (15 if overlap == "allow" else 5)
        assert await rows(yard, "all") == [(5, 0)] * 3
        assert await rows(yard, "some") == [(5, 0), (0, 5), (0, 5)]
        again = await yard.schedules.backfill("all", now - timedelta(hours=3), now)
        assert again == []
        gate.set()


@pytest.mark.spec("SCH-21")
async def test_a_function_that_fails_by_hand_says_so(url):
    """Whoever runs it by hand gets the reason, and no task is made; a schedule that is paused runs by hand."""
    answers: list[Any] = [OSError("no database"), [{"account": 1}, {"account": "x"}], ACCOUNTS]

    async def accounts() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with build(url) as yard:
        await yard.schedules.add("daily", "0 4 * * *", "visit", each=accounts)
        await yard.schedules.pause("daily")
        with pytest.raises(ItemsFailed, match=r"accounts\(\) raised OSError: no database"):
            await yard.schedules.run_each("daily")
        with pytest.raises(ItemsFailed, match="item 1"):
            await yard.schedules.run_each("daily")
        assert await yard.store.list_tasks() == []
        assert len((await yard.schedules.run_each("daily")).tasks) == 5
        status = await yard.schedules.get("daily")
        assert status.state.failed == 0


async def test_another_list_is_taken_from_then_on(url):
    """A program with another list changes the stored one, and the counters stay as they were."""
    async with build(url) as yard:
        await yard.schedules.add("daily", 3600, "visit", each=ACCOUNTS)
        await yard.schedules.run_each("daily")
        before = (await yard.schedules.get("daily")).state
        await yard.schedules.add("daily", 3600, "visit", each=ACCOUNTS[:2])
        status = await yard.schedules.get("daily")
        assert status.state == before
        assert status.schedule is not None
        assert status.schedule.each is not None
        assert status.schedule.each.count == 2


REFUSED = [
    pytest.param({"each": 5}, InvalidInput, "each must be a list", id="number"),
    pytest.param({"each": [{"account": "x"}]}, InvalidArguments, "item 0", id="argument"),
    pytest.param({"each": [{"account": 1}, {"acount": 2}]}, InvalidArguments, "item 1", id="name"),
    pytest.param({"each": [{"account": n} for n in range(MOST_ITEMS + 1)]}, InvalidInput, "10,001 items", id="many"),
    pytest.param({"each": [{"account": 10**200}] * 9_000}, InvalidInput, "bytes of JSON", id="large"),
    pytest.param({"each": ACCOUNTS, "each_timeout_s": 5}, InvalidInput, "no effect on a list", id="timeout"),
    pytest.param({"each": ACCOUNTS, "dedupe_scope": "window"}, InvalidInput, "is not one of", id="window"),
    pytest.param(
        {"each": ACCOUNTS, "dedupe_scope": "queued", "overlap": "allow"}, InvalidInput, "no effect", id="allow"
    ),
    pytest.param({"args": {"account": 1}, "dedupe_scope": "queued"}, InvalidInput, "without each", id="plain"),
    pytest.param({"each": list, "each_timeout_s": -1}, InvalidInput, "each_timeout_s", id="negative"),
]


@pytest.mark.parametrize(("settings", "error", "problem"), REFUSED)
async def test_what_makes_no_sense_is_refused(settings, error, problem):
    """At once, and nothing is stored."""
    async with build("memory://") as yard:
        with pytest.raises(error, match=problem):
            await yard.schedules.add("daily", 3600, "visit", **settings)
        assert await yard.schedules.list_all() == []


async def test_a_schedule_of_many_items_has_no_single_task():
    """`run_now` says what to call instead, and a backfill of too many tasks is refused."""
    async with build("memory://") as yard:
        await yard.schedules.add("daily", 60, "visit", each=[{"account": n} for n in range(MOST_ITEMS)])
        with pytest.raises(InvalidInput, match="run_each"):
            await yard.schedules.run_now("daily")
        now = datetime.now(UTC)
        with pytest.raises(BatchTooLarge):
            await yard.schedules.backfill("daily", now - timedelta(hours=1), now)
        await yard.schedules.add("plain", 60, "visit", {"account": 3})
        made = await yard.schedules.run_each("plain")
        assert (await made.tasks[0].result(timeout_s=PATIENCE_S), made.skipped) == (3, 0)


@pytest.mark.spec("SCH-21")
async def test_an_empty_list_fires_and_makes_nothing(url):
    """There is nobody today: that is no failure."""
    async with build(url) as yard:
        await yard.schedules.add("daily", 3600, "visit", each=[])
        made = await yard.schedules.run_each("daily")
        assert made == ([], 0)
        assert await rows(yard, "daily") == [(0, 0)]


@pytest.mark.spec("SCH-21")
async def test_as_many_items_as_there_may_be(url):
    """All of them are stored in one transaction, and all are skipped the second time, long before a store gives up."""
    async with build(url).client() as client:
        await client.schedules.add("daily", "0 4 * * *", "visit", each=[{"account": n} for n in range(MOST_ITEMS)])
        made = await client.schedules.run_each("daily")
        assert (len(made.tasks), made.skipped) == (MOST_ITEMS, 0)
        again = await client.schedules.run_each("daily")
        assert (len(again.tasks), again.skipped) == (0, MOST_ITEMS)


@pytest.mark.spec("SCH-14", "SCH-21")
async def test_an_item_that_is_submitted_in_an_open_transaction_is_waited_for(postgres_url):
    """Whether its work will be there is not known before that has ended: then it is, and is skipped."""
    async with build(postgres_url) as yard:
        await yard.schedules.add("daily", "0 4 * * *", "visit", each=ACCOUNTS)
        async with by_asyncpg(postgres_url) as theirs:
            await yard.submit("visit", ACCOUNTS[3], dedupe="merge", delay_s=3600, connection=theirs.connection)
            running = asyncio.create_task(yard.schedules.run_each("daily"))
            await yard.submit("visit", {"account": 77})
            assert await rows(yard, "daily") == []
            assert not running.done()
        made = await running
        assert (len(made.tasks), made.skipped) == (4, 1)


@pytest.mark.spec("SCH-14", "SCH-21")
async def test_a_fire_that_waits_for_an_open_transaction_holds_nothing_up(postgres_url):
    """Other schedules fire meanwhile; when the transaction has ended, the fire comes, late, and has not failed."""
    async with build(postgres_url) as yard:
        async with by_asyncpg(postgres_url) as theirs:
            await yard.submit("visit", ACCOUNTS[3], dedupe="merge", delay_s=3600, connection=theirs.connection)
            await yard.schedules.add("blocked", 1, "visit", each=ACCOUNTS)
            await yard.schedules.add("other", 1, "visit", {"account": 50})
            async with asyncio.timeout(PATIENCE_S):
                with yard._engine.changes() as changes:
                    while len(await rows(yard, "other")) < 3:
                        changes.clear()
                        await changes.wait()
            assert await rows(yard, "blocked") == []
        async with asyncio.timeout(PATIENCE_S):
            with yard._engine.changes() as changes:
                while not (fires := await rows(yard, "blocked")):
                    changes.clear()
                    await changes.wait()
        assert fires[0] == (4, 1)
        assert (await yard.schedules.get("blocked")).state.failed == 0
