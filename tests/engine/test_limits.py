"""How many at once: slots per source and in total, and what a burst may cost."""

import asyncio

import pytest

from taskyard.model.queue import QueueSettings
from tests.engine.support import Work, quiet


@pytest.mark.spec("SCH-08", "SCH-24")
@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_no_more_of_a_source_than_its_count(rig, limit):
    """At most `concurrent_count` tasks of a source run at once, and each that ends makes room for the next."""
    work = Work()
    rig.consumer("work", work, concurrency=limit)
    uuids = await rig.submit_many("work", 12)
    for done, uuid in enumerate(uuids):
        await quiet()
        assert work.began == uuids[: done + limit]
        work.let_go(uuid)
    await quiet()
    assert work.most_at_once == limit
    assert work.ended == uuids


@pytest.mark.spec("SCH-08")
async def test_sources_do_not_hold_each_other_up(rig):
    """A source at its limit, with a long backlog, delays no other source."""
    busy, free = Work(), Work()
    rig.consumer("busy", busy)
    rig.consumer("free", free)
    await rig.submit_many("busy", 50)
    uuid = await rig.submit("free")
    await quiet()
    assert free.began == [uuid]


@pytest.mark.spec("SCH-08")
@pytest.mark.parametrize("count", [None, 0, -3, "many"])
async def test_a_count_that_makes_no_sense_is_one(rig, count):
    """A missing or invalid `concurrent_count` counts as 1."""
    work = Work()
    rig.consumer("work", work, concurrency=count)
    await rig.submit_many("work", 3)
    await quiet()
    assert len(work.began) == 1


@pytest.mark.spec("SCH-08")
async def test_an_error_gives_the_slot_back(rig):
    """A run that raises frees its slot: the next task starts."""
    ran = []

    async def fail(record) -> None:
        ran.append(record.uuid)
        raise ValueError("no")

    rig.consumer("fail", fail)
    uuids = await rig.submit_many("fail", 5)
    await quiet()
    assert ran == uuids


@pytest.mark.spec("SCH-15")
async def test_no_more_in_total_than_the_node_allows(start_rig):
    """All sources together never run more than `max_running`."""
    rig = await start_rig(max_running=3)
    works = [Work() for _ in range(4)]
    for number, work in enumerate(works):
        rig.consumer(f"work{number}", work, concurrency=2)
    uuids = [await rig.submit(f"work{n % 4}") for n in range(12)]
    for uuid in uuids:
        await quiet()
        assert sum(len(work.began) - len(work.ended) for work in works) <= 3
        for work in works:
            work.let_go(uuid)
    await quiet()
    assert sum(len(work.ended) for work in works) == 12


@pytest.mark.slow
@pytest.mark.spec("SCH-19")
async def test_a_burst_creates_no_more_runners_than_slots(start_rig):
    """A hundred thousand tasks due at one instant never create more asyncio tasks than there are slots."""
    rig = await start_rig(max_running=20)
    most, done = 0, 0

    async def count(record) -> None:
        nonlocal most, done
        done += 1
        if done % 50 == 0:  # all_tasks() is slow: a sample says as much
            most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)

    rig.consumer("count", count, concurrency=50)
    resting = len(asyncio.all_tasks())
    for _ in range(100):
        await rig.submit_many("count", 1000, in_s=1)
    while done < 100_000:
        await rig.advance(1)
    assert resting < most <= resting + 20


@pytest.mark.spec("QUE-03")
async def test_an_idle_queue_starts_at_once_and_goes_on_at_once(rig):
    """An idle node goes from submit to started in one turn, and from an end to the next start in one more."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    before = rig.store.turns
    first = await rig.submit("work")
    await quiet()
    assert (work.began, rig.store.turns) == ([first], before + 1)
    second = await rig.submit("work")
    before = rig.store.turns
    work.let_go(first)
    await quiet()
    assert (work.began, rig.store.turns) == ([first, second], before + 1)


@pytest.mark.spec("QUE-03")
async def test_what_cannot_start_waits_queued(rig):
    """A task without room waits as queued."""
    rig.consumer("work", Work())
    uuids = await rig.submit_many("work", 2)
    await quiet()
    assert [await rig.state(uuid) for uuid in uuids] == ["running", "queued"]


async def test_a_queue_s_concurrency_holds_beside_the_source_s(rig):
    """The tighter of queue and source wins, and a set queue takes effect from the next turn on."""
    work = Work()
    rig.consumer("work", work, concurrency=5)
    await rig.store.set_queue(QueueSettings(name="default", concurrency=2))
    await rig.submit_many("work", 5)
    await quiet()
    assert len(work.began) == 2
    await rig.store.set_queue(QueueSettings(name="default", concurrency=4))
    rig.store.hint()
    await quiet()
    assert len(work.began) == 4


async def test_a_consumer_added_while_running_gets_its_tasks(rig):
    """A consumer that is registered after its tasks were submitted gets them when the engine is told of it."""
    uuid = await rig.submit("late")
    await quiet()
    assert await rig.state(uuid) == "queued"
    work = Work()
    rig.consumer("late", work)
    await quiet()
    assert work.began == [uuid]


async def test_submitters_share_a_turn(rig):
    """Sixty-four tasks submitted at once by as many clients are added by one turn."""
    rig.consumer("work", Work())
    await quiet()
    before = rig.store.turns
    await asyncio.gather(*[rig.submit("work") for _ in range(64)])
    assert rig.store.turns == before + 1


async def test_one_turn_is_in_flight_at_a_time(rig):
    """What is handed in while a turn is in flight goes together into the next one."""
    rig.consumer("work", Work())
    await quiet()
    before, rig.store.held = rig.store.turns, asyncio.Event()
    adds = [rig.offer(rig.record("work"))]
    await quiet()
    adds += [rig.offer(rig.record("work")) for _ in range(9)]
    await quiet()
    assert rig.store.turns == before + 1
    rig.store.held.set()
    await asyncio.gather(*adds)
    assert rig.store.turns == before + 2


async def test_a_hint_without_work_costs_one_turn(rig):
    """A node that asked for work and got none does not ask again by itself."""
    rig.consumer("work", Work())
    await quiet()
    before = rig.store.turns
    rig.store.hint()
    await quiet()
    assert rig.store.turns == before + 1


async def test_a_submitter_that_gave_up_submits_nothing(rig):
    """An add whose waiter was cancelled before the turn began is not carried out."""
    rig.store.held = asyncio.Event()
    first = rig.offer(rig.record("work"))
    await quiet()
    second = rig.offer(rig.record("work"))
    second.cancel()
    rig.store.held.set()
    await first
    await quiet()
    assert await rig.store.count() == {("default", "queued"): 1}
