"""Consumers that come and go while the engine runs."""

import asyncio

import pytest

from taskyard.errors import StoreUnavailable
from tests.engine.support import Work, quiet


@pytest.mark.spec("SCH-27")
async def test_what_was_claimed_and_has_not_begun_goes_back(rig):
    """A task that was claimed for a consumer that goes before it begins is queued again, and costs it no retry."""
    work = Work()
    rig.consumer("work", work)
    rig.store.answers_held = asyncio.Event()
    offered = rig.offer(rig.record("work"))
    await quiet()
    consumer = rig.consumers.pop("work")
    rig.engine.consumers_changed()
    rig.store.answers_held.set()
    ((added,),) = await asyncio.gather(offered)
    await rig.advance(1)
    record = await rig.found(added.uuid)
    assert (record.state, record.retries, record.error, work.began) == ("queued", 0, None, [])
    rig.consumers["work"] = consumer
    rig.engine.consumers_changed()
    await quiet()
    assert work.began == [added.uuid]


async def published(rig):
    (status,) = await rig.store.nodes()
    return status.node


async def test_a_node_tells_what_it_serves_now(rig):
    """Its row in the store says which sources it serves, how many of each, where, and since when it is there."""
    before = await published(rig)
    rig.clock.advance(5)
    rig.consumer("work", Work(), concurrency=3)
    rig.consumer("steady", str, queue="cpu")
    await quiet()
    node = await published(rig)
    assert (node.consumers, node.queues, node.limits) == (
        ("work", "steady"),
        ("cpu", "default"),
        {"work": 3, "steady": 1},
    )
    assert (node.executors, node.capacities) == ({"steady": "thread"}, {"thread": 32})
    assert (node.started_at, node.is_stopping) == (before.started_at, False)
    del rig.consumers["work"]
    rig.engine.consumers_changed()
    await quiet()
    assert (await published(rig)).consumers == ("steady",)


async def test_what_a_node_serves_is_told_when_the_store_is_back(rig, monkeypatch):
    """A store that was away when a consumer came is told later."""
    tell, tries = rig.store.describe, []

    async def away(node, specs):
        tries.append(node)
        if len(tries) < 3:
            raise StoreUnavailable("not now")
        await tell(node, specs)

    monkeypatch.setattr(rig.store, "describe", away)
    rig.consumer("work", Work())
    await quiet()
    assert (await published(rig)).consumers == ()
    for _ in range(3):
        await rig.advance(5)
    assert ((await published(rig)).consumers, len(tries)) == (("work",), 3)


async def test_a_node_that_stops_says_so_as_long_as_it_runs_something(rig):
    """From the first moment of a stop until what runs has ended, the node is known to take nothing new."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    assert (await published(rig)).is_stopping
    work.let_go(uuid)
    await stopping
    assert await rig.store.nodes() == []
