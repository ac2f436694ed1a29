"""When: the due-time loop, on a clock that the test moves."""

import asyncio
from datetime import datetime, timedelta, timezone

import pytest

from taskyard.scheduling.due import DueLoop
from tests.engine.support import Rig, quiet


@pytest.fixture
def fired(rig: Rig) -> list[str]:
    """The tasks that were run, in order."""
    ran: list[str] = []

    async def fire(record) -> None:
        ran.append(record.uuid)

    rig.consumer("fire", fire)
    return ran


@pytest.mark.spec("SCH-05")
async def test_tasks_fire_in_order_of_their_time(rig, fired):
    """Tasks fire in the order of their due times, whatever the order they were added in."""
    late, early, middle = [await rig.submit("fire", in_s=s) for s in (3, 1, 2)]
    for _ in range(3):
        await rig.advance(1)
    assert fired == [early, middle, late]


@pytest.mark.spec("SCH-05")
async def test_all_at_once_still_fire_in_order(rig, fired):
    """Tasks that have all become due by the time anyone looks fire in the order of their due times."""
    late, early, middle = [await rig.submit("fire", in_s=s) for s in (3, 1, 2)]
    await rig.advance(10)
    assert fired == [early, middle, late]


@pytest.mark.spec("SCH-05")
async def test_equal_times_fire_in_the_order_added(rig, fired):
    """Tasks due at one instant fire in the order they were added."""
    uuids = [await rig.submit("fire", in_s=1) for _ in range(20)]
    await rig.advance(1)
    assert fired == uuids


@pytest.mark.spec("SCH-05")
async def test_times_are_compared_in_utc(rig, fired):
    """Time zones do not matter: moments are compared."""
    now = rig.clock.now()
    tokyo, lima = timezone(timedelta(hours=9)), timezone(timedelta(hours=-5))
    second = await rig.submit("fire", at=(now + timedelta(seconds=2)).astimezone(tokyo))
    first = await rig.submit("fire", at=(now + timedelta(seconds=1)).astimezone(lima))
    await rig.advance(2)
    assert fired == [first, second]


@pytest.mark.spec("SCH-04", "SCH-24")
async def test_an_earlier_task_overtakes(rig, fired):
    """A task due at 1 s, added while one due at 5 s is waited for, fires at 1 s."""
    later = await rig.submit("fire", in_s=5)
    await rig.advance(0.5)
    sooner = await rig.submit("fire", in_s=0.5)
    await rig.advance(0.5)
    assert fired == [sooner]
    await rig.advance(4)
    assert fired == [sooner, later]


@pytest.mark.spec("SCH-06")
async def test_a_past_time_fires_at_once(rig, fired):
    """A task whose time is past fires without any time passing."""
    uuid = await rig.submit("fire", in_s=-1)
    await quiet()
    assert fired == [uuid]


async def test_nothing_fires_early(rig, fired):
    """A task does not fire a moment before its time."""
    await rig.submit("fire", in_s=1)
    await rig.advance(0.999_999)
    assert fired == []
    await rig.advance(0.000_001)
    assert len(fired) == 1


@pytest.mark.spec("SCH-07")
async def test_an_idle_node_rests(rig):
    """With nothing to do a node wakes at most twice a second and never asks the store for a turn."""
    await quiet()
    turns, waits = rig.store.turns, rig.clock.waits
    for _ in range(100):
        await rig.advance(0.1)
    assert rig.store.turns == turns
    assert rig.clock.waits - waits <= 20


@pytest.mark.spec("SCH-07")
async def test_waiting_for_a_far_time_is_as_restful(rig, fired):
    """With a task due in a year a node wakes at most twice a second and asks for no turn."""
    await rig.submit("fire", in_s=365 * 86_400)
    await quiet()
    turns, waits = rig.store.turns, rig.clock.waits
    for _ in range(100):
        await rig.advance(0.1)
    assert rig.store.turns == turns
    assert rig.clock.waits - waits <= 20


@pytest.mark.spec("SCH-16")
async def test_a_clock_set_forward_fires_what_is_due_now(rig, fired):
    """When somebody sets the clock an hour ahead, what that makes due fires within a second, once."""
    uuid = await rig.submit("fire", in_s=1800)
    await quiet()
    rig.clock.step(3600)
    await rig.advance(1)
    assert fired == [uuid]
    rig.clock.step(-3600)
    await rig.advance(3600)
    assert fired == [uuid]


@pytest.mark.spec("SCH-16")
async def test_a_clock_set_back_neither_fires_early_nor_loses(rig, fired):
    """When somebody sets the clock an hour back, a task keeps to the wall clock: an hour later, and once."""
    uuid = await rig.submit("fire", in_s=10)
    await quiet()
    rig.clock.step(-3600)
    await rig.advance(60)
    assert fired == []
    for _ in range(60):
        await rig.advance(60)
    assert fired == [uuid]


@pytest.mark.spec("SCH-16")
async def test_work_under_way_survives_a_clock_step(rig):
    """A task that runs while the clock is set back completes once, and retries are not lost."""
    runs = []

    async def twice(record) -> None:
        runs.append(record.attempt)
        if record.attempt == 1:
            raise ConnectionError

    rig.consumer("twice", twice)
    uuid = await rig.submit("twice")
    await quiet()
    rig.clock.step(-86_400)
    for _ in range(25):
        await rig.advance(3600)
    assert (await rig.outcome(uuid)).state == "completed"
    assert runs == [1, 2]


async def test_a_store_whose_clock_is_behind_is_not_pestered(rig, fired):
    """While the store says that a due task is not due yet, it is asked a hundred times, then about once a second."""
    asked = 0

    def count() -> None:
        nonlocal asked
        asked += 1
        loop.tell(due)

    due = rig.clock.now() - timedelta(seconds=1)
    loop = DueLoop(rig.clock, count)
    loop.tell(due)
    running = asyncio.create_task(loop.run())
    for _ in range(1000):
        await rig.advance(0.001)
    assert 100 <= asked <= 120
    for _ in range(600):
        await rig.advance(0.1)
    assert 130 <= asked <= 170
    running.cancel()


async def test_more_due_than_one_turn_promotes(rig, fired):
    """When more tasks are due at one instant than a turn promotes, all of them fire."""
    rig.consumers.clear()
    rig.consumer("fire", fire_into(fired), concurrency=100)
    at: datetime = rig.clock.now() + timedelta(seconds=1)
    await rig.submit_many("fire", 2500, at=at)
    for _ in range(20):
        await rig.advance(1)
    assert len(fired) == 2500


def fire_into(ran: list[str]):
    async def fire(record) -> None:
        ran.append(record.uuid)

    return fire
