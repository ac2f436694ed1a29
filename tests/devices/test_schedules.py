"""Schedules of a pool: a task for each account, but for those that are queued, busy or quarantined."""

from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from taskyard import ExecutorService, Task, TaskFilter, Yard
from taskyard.devices import Device, DeviceConsumer, GameAccount, SimulatedDevice
from taskyard.errors import InvalidInput, ItemsFailed, UnknownConsumer
from taskyard.model.device import QuarantinedAccount, read_account
from taskyard.model.notes import AuditStamp
from taskyard.model.task import DedupeScope
from tests.devices.farm import Work, add_consumers, eventually, phones

FAR = "0 4 31 12 *"
"""A time that does not come while the tests run."""


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request, tmp_path):
    """Each kind of store."""
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/farm.db"
        case _:
            return request.getfixturevalue("postgres_url")


@asynccontextmanager
async def farm(url, work, *, devices=2, **schedule):
    """A service with the schedule `daily`."""
    service = ExecutorService(devices=phones(devices), store=url, heartbeat_s=1.0)
    add_consumers(service, work)
    service.pool.schedule("daily", **({"cron": FAR} | schedule))
    async with service:
        await eventually(service.yard, lambda: len(service.pool.places.ready()) == devices)
        yield service
        work.let_go()


async def accounts_of(service, run):
    return [read_account((await handle.record()).key or "") for handle in run.tasks]


@pytest.mark.spec("DEV-01", "SCH-21")
async def test_a_schedule_makes_a_task_for_each_account(url):
    """In the order of the list; numbers and texts come back as they were; each task has the key of its account."""
    work = Work()
    accounts = [1, "1", GameAccount("ana", data={"server": 3})]
    async with farm(url, work, devices=1, accounts=accounts, args={"level": 5}) as service:
        run = await service.yard.schedules.run_each("daily")
        assert run.skipped == 0
        assert await accounts_of(service, run) == [1, "1", "ana"]
        assert (await run.tasks[2].record()).task.args["account"]["data"] == {"server": 3}
        work.let_go()
        assert [await handle.result(timeout_s=20) for handle in run.tasks] == [1, "1", "ana"]
        assert [account for _, account, _ in work.order] == [1, "1", "ana"]


@pytest.mark.spec("DEV-01", "SCH-21")
async def test_accounts_that_are_queued_busy_or_quarantined_are_skipped(url):
    """Whatever task of the account runs; of those that are queued, one of this consumer. The others get theirs."""
    work = Work()
    async with farm(url, work, devices=1, accounts=[1, 2, 3, 4, 5, 5]) as service:
        schedules = service.yard.schedules
        assert await service.enqueue(Task(source="weekly"), GameAccount(1))
        await work.next()
        assert await service.enqueue(Task(source="daily"), GameAccount(2))
        assert await service.enqueue(Task(source="weekly"), GameAccount(3))
        stamp = AuditStamp("ann", datetime.now(UTC), "")
        bad = QuarantinedAccount(pool="devices", account="4", consumer="daily", failures=9, quarantined=stamp)
        await service.yard.store.quarantine_account(bad)
        run = await schedules.run_each("daily")
        assert await accounts_of(service, run) == [3, 5]
        assert run.skipped == 4
        (row,) = await schedules.list_fires("daily")
        assert (row.made, row.skipped) == (2, 4)
        again = await schedules.run_each("daily")
        assert (again.tasks, again.skipped) == ([], 6)
        work.let_go()
        await eventually(service.yard, lambda: len(work.order) == 5)
        assert len({(name, account) for name, account, _ in work.order}) == 5


@pytest.mark.spec("DEV-01", "SCH-21")
async def test_a_schedule_fires_for_the_accounts_of_a_function(url):
    """At its times; while their tasks wait, the accounts are skipped, and when they have ended, they are due again."""
    work, asked = Work(), []

    async def accounts():
        asked.append(1)
        return range(20)

    async with farm(url, work, cron=None, every_s=1, accounts=accounts) as service:
        yard = service.yard

        async def has_skipped():
            rows = await yard.schedules.list_fires("daily")
            return any((row.made, row.skipped) == (0, 20) for row in rows)

        await eventually(yard, has_skipped)
        assert len(await yard.store.list_ids(TaskFilter(queue="devices"), limit=100)) == 20
        status = await yard.schedules.get("daily")
        assert status.schedule is not None
        assert status.schedule.each is not None
        assert status.schedule.each.dedupe_scope is DedupeScope.KEY_IDLE
        assert status.schedule.each.function.endswith("accounts")
        await yard.schedules.pause("daily")
        work.let_go()
        await eventually(yard, lambda: len(work.order) >= 20)
        assert {account for _, account, _ in work.order} == set(range(20))
        assert len(asked) >= 2


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: 5, r"<lambda>\(\) returned wrong items: accounts must be a list of accounts, not 5"),
        (lambda: "abc", "must be a list of accounts"),
        (lambda: [1, None], "must be a whole number or a text"),
        (lambda: [True], "must be a whole number or a text"),
        (lambda: [""], "account_id"),
        (lambda: range(1_000_000), "1,000,000 accounts are more than 10,000"),
    ],
)
async def test_nonsense_of_a_function_of_accounts_makes_nothing(given, why):
    """It is said what is wrong, and no account gets a task."""
    async with farm("memory://", Work(), accounts=given) as service:
        with pytest.raises(ItemsFailed, match=why):
            await service.yard.schedules.run_each("daily")
        assert await service.yard.store.list_tasks() == []


@pytest.mark.spec("DEV-15", "SCH-21")
async def test_a_schedule_may_ask_for_a_role(url):
    """Its tasks run on devices of that role, and stand in the bucket of it."""
    work = Work()
    roles = {1: "eu", 2: "us"}
    devices = [SimulatedDevice(n, name=f"emu-{n}", labels={"role": role}) for n, role in roles.items()]
    service = ExecutorService(devices=devices, store=url, heartbeat_s=1.0, bucket_by="role")
    add_consumers(service, work)
    for role in roles.values():
        accounts = [f"{role}-{n}" for n in range(3)]
        service.schedule("daily", cron=FAR, accounts=accounts, name=role, requires={"role": role})
    async with service:
        work.let_go()
        for role in roles.values():
            run = await service.yard.schedules.run_each(role)
            record = await run.tasks[0].record()
            assert (record.bucket, len(run.tasks)) == (role, 3)
        await eventually(service.yard, lambda: len(work.order) == 6)
        assert {(str(account)[:2], device) for _, account, device in work.order} == {("eu", "emu-1"), ("us", "emu-2")}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"accounts": [1], "cron": FAR, "every_s": 5}, "either cron or every_s"),
        ({"accounts": [1]}, "either cron or every_s"),
        ({"accounts": 7, "cron": FAR}, "a list of accounts"),
        ({"accounts": [1.5], "cron": FAR}, "a whole number or a text"),
        ({"accounts": [], "cron": FAR}, "accounts has no account; a list that changes is given as a function"),
        ({"accounts": [1], "cron": FAR, "overlap": "allow"}, "must be 'skip' for accounts"),
        ({"accounts": [1], "cron": FAR, "args": {"level": "x"}}, "level"),
        ({"accounts": [1], "every_s": -5}, "interval"),
        ({"accounts": [1], "cron": FAR, "requires": {"role": 5}}, "label role"),
    ],
)
async def test_a_schedule_of_accounts_that_makes_no_sense_is_refused(settings, problem):
    """Where it is defined."""
    yard = Yard("memory://")
    pool = yard.device_pool("phones", devices=phones(1))
    add_consumers(pool, Work())
    with pytest.raises(InvalidInput, match=problem):
        pool.schedule("daily", **settings)


async def test_a_schedule_is_for_a_consumer_of_the_pool():
    """One of another pool, or of none, is refused; a class form has its account as well."""
    yard = Yard("memory://")
    pool = yard.device_pool("phones", devices=phones(1))

    @yard.consumer
    async def elsewhere() -> None: ...

    class Visit(DeviceConsumer):
        name = "visit"

        async def execute(self, device: Device, account: GameAccount) -> None: ...

    pool.register(Visit())
    with pytest.raises(UnknownConsumer):
        pool.schedule("elsewhere", accounts=[1], cron=FAR)
    schedule = pool.schedule("visit", accounts=[1, 2], cron=FAR, name="visits")
    assert (schedule.name, schedule.consumer) == ("visits", "visit")
    assert schedule.each is not None
    assert schedule.each.count == 2


@pytest.mark.spec("DEV-01", "SCH-21")
async def test_a_schedule_of_one_account_follows_the_same_rule(url):
    """A schedule of the yard whose argument is one account: while that is busy its fire makes no task."""
    work = Work()
    service = ExecutorService(devices=phones(1), store=url, heartbeat_s=1.0)
    add_consumers(service, work)
    async with service:
        schedules = service.yard.schedules
        await schedules.add("one", FAR, "daily", {"account": {"account_id": 7}}, priority="high")
        handle = await schedules.run_now("one")
        assert (await handle.record()).key == "7"
        with pytest.raises(InvalidInput, match="made no task"):
            await schedules.run_now("one")
        assert [(row.made, row.skipped) for row in await schedules.list_fires("one")] == [(0, 1), (1, 0)]
        work.let_go()
        assert await handle.result(timeout_s=20) == 7
