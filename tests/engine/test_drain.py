"""Draining: the node takes nothing new, finishes what it runs, and stays."""

import asyncio
import os
import socket

from taskyard.errors import StoreUnavailable
from taskyard.ports.store import Add, News, Signals
from taskyard.version import VERSION
from tests.engine.support import Rig, Work, quiet


async def drain(rig: Rig, *, on: bool = True) -> None:
    """As somebody in another process would."""
    await rig.store.drain(rig.engine.incarnation, on=on)
    rig.store.hint()
    await quiet()


async def test_a_drained_node_finishes_what_it_runs_and_takes_nothing_new(rig):
    """What runs goes on and is recorded; what waits, and what comes, stays in the queue; the node stays joined."""
    work = Work()
    rig.consumer("work", work, concurrency=2)
    first, second, waiting = await rig.submit_many("work", 3)
    await quiet()
    await drain(rig)
    later = await rig.submit("work")
    for uuid in (first, second):
        work.let_go(uuid)
    await quiet()
    await rig.advance(10)
    assert work.began == [first, second]
    states = [await rig.state(uuid) for uuid in (first, second, waiting, later)]
    assert states == ["completed", "completed", "queued", "queued"]
    (status,) = await rig.store.nodes()
    assert (status.is_draining, status.running) == (True, 0)


async def test_what_is_due_joins_its_queue_although_the_node_is_drained(rig):
    """A drained node still promotes what is due, so that others may take it."""
    rig.consumer("work", Work())
    await drain(rig)
    uuid = await rig.submit("work", in_s=5)
    await rig.advance(5)
    assert await rig.state(uuid) == "queued"


async def test_a_drain_that_is_taken_back_lets_the_node_go_on(rig):
    """At once after it was taken back, what waits is started."""
    work = Work()
    rig.consumer("work", work)
    await drain(rig)
    uuid = await rig.submit("work")
    await quiet()
    assert work.began == []
    await drain(rig, on=False)
    assert work.began == [uuid]
    assert not rig.engine.is_draining


async def test_a_claim_on_its_way_is_run(rig):
    """A task that was claimed before the drain was heard is run, not given back."""
    work = Work()
    rig.consumer("work", work)
    rig.store.answers_held = asyncio.Event()
    offered = rig.offer(rig.record("work"))
    await quiet()
    await drain(rig)
    assert rig.engine.is_draining
    rig.store.answers_held.set()
    [added] = await offered
    await quiet()
    assert work.began == [added.uuid]


async def test_whoever_waits_for_the_drain_is_told_when_all_is_recorded(rig):
    """`drained` returns when the node was asked to drain and its last run is settled, not before either."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    waiting = asyncio.create_task(rig.engine.drained())
    await quiet()
    work.let_go(uuid)
    await quiet()
    assert not waiting.done()  # nothing runs, but nobody drains it
    uuid = await rig.submit("work")
    await drain(rig)
    assert not waiting.done()
    work.let_go(uuid)
    await asyncio.wait_for(waiting, 5)
    assert await rig.state(uuid) == "completed"


async def test_a_drain_is_heard_after_an_outage(rig, monkeypatch):
    """A store that is away when the drain is announced is asked again."""
    work = Work()
    rig.consumer("work", work)

    async def away(node: str) -> None:
        raise StoreUnavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "signals", away)
        await drain(rig)
    assert not rig.engine.is_draining
    await rig.advance(1)
    assert rig.engine.is_draining


async def test_a_node_says_who_it_is():
    """Others see its name, process, version, consumers and their queues."""
    rig = Rig(name="blue")
    rig.consumer("shrink", Work(), queue="cpu")
    rig.consumer("work", Work())
    rig.consumer("fetch", Work(), queue="cpu")
    await rig.engine.start()
    (status,) = await rig.store.nodes()
    node = status.node
    assert (node.name, node.pid, node.host, node.version) == ("blue", os.getpid(), socket.gethostname(), VERSION)
    assert (node.consumers, node.queues) == (("shrink", "work", "fetch"), ("cpu", "default"))
    assert node.started_at == rig.clock.now()
    await rig.engine.stop()


async def test_news_of_new_tasks_is_no_reason_to_ask_for_anything_else(rig, monkeypatch):
    """Of new tasks, as many as others submit, a node takes what it can; what was asked of it, it asks for when somebody
    may have asked."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    asked: list[str] = []

    async def signals(incarnation: str) -> Signals:
        asked.append(incarnation)
        return Signals([])

    monkeypatch.setattr(rig.store, "signals", signals)
    record = rig.record("work")
    await rig.store.turn("", adds=[Add([record])])
    rig.store.hint(News.ADDED)
    await quiet()
    assert (work.began, asked) == ([record.uuid], [])
    rig.store.hint(News.CHANGED)
    await quiet()
    assert asked == [rig.engine.incarnation]
