"""Starting and stopping: nothing new, what runs finishes, what cannot is given back or left claimed."""

import asyncio
import threading

import pytest

from taskyard.errors import NotOpen, StoreUnavailable
from taskyard.execution.inline import InProcessExecutor
from tests.engine.support import Rig, ShakyStore, Work, quiet


@pytest.mark.spec("SCH-11")
async def test_start_is_idempotent(rig):
    """A second start changes nothing: one node is joined, tasks run once."""
    work = Work()
    rig.consumer("work", work)
    await rig.engine.start()
    assert len(await rig.store.nodes()) == 1
    uuid = await rig.submit("work")
    await quiet()
    assert work.began == [uuid]


@pytest.mark.spec("SCH-11", "SCH-24")
async def test_stop_fires_nothing_new_and_lets_running_tasks_finish(rig):
    """After stop() nothing starts, what runs completes, and stop() returns then."""
    work = Work()
    rig.consumer("work", work, concurrency=3)
    uuids = await rig.submit_many("work", 10)
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop())
    for uuid in uuids:
        work.let_go(uuid)
    await stopping
    assert work.ended == uuids[:3]
    assert [await rig.state(uuid) for uuid in uuids[:4]] == ["completed"] * 3 + ["queued"]
    assert await rig.store.nodes() == []


async def test_two_may_wait_for_what_runs(rig):
    """Everyone who waits until nothing runs hears of it, also two at once."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    waiting = [asyncio.create_task(rig.engine._runner.drain(None)) for _ in range(2)]
    await quiet()
    work.let_go(uuid)
    await quiet()
    assert [one.done() and one.result() for one in waiting] == [True, True]


@pytest.mark.spec("SCH-11")
async def test_stop_waits_for_ever_unless_told(rig):
    """Without a grace period stop() never cancels, however long a task takes."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    await rig.advance(86_400)
    assert not stopping.done()
    work.let_go(uuid)
    await stopping
    assert await rig.state(uuid) == "completed"


@pytest.mark.spec("SCH-12")
async def test_a_stop_that_is_cancelled_gives_back_what_runs(rig):
    """A stop() that is cancelled while it waits interrupts what runs, gives it back and leaves."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert (await rig.state(uuid), work.cancelled) == ("queued", [uuid])
    assert await rig.store.nodes() == []


@pytest.mark.spec("SCH-12")
async def test_a_stop_that_is_cancelled_while_it_writes(rig):
    """A stop() that is cancelled while the last turn is under way writes what that turn did not."""
    work = Work()
    rig.consumer("work", work, concurrency=2)
    first, second = await rig.submit_many("work", 2)
    await quiet()
    rig.store.held = asyncio.Event()
    work.let_go(first)
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop())
    work.let_go(second)
    await quiet()
    stopping.cancel()
    await asyncio.sleep(0)
    rig.store.held.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert [await rig.state(uuid) for uuid in (first, second)] == ["completed"] * 2
    assert await rig.store.nodes() == []


@pytest.mark.spec("SCH-11")
async def test_what_was_claimed_while_stopping_goes_back(rig):
    """A claim that comes back from a turn that was in flight at stop() is given back unrun."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    rig.store.held = asyncio.Event()
    adding = rig.offer(rig.record("work"))
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    rig.store.held.set()
    await stopping
    [added] = await adding
    record = await rig.found(added.uuid)
    assert (record.state, record.attempt, work.began) == ("queued", 0, [])


@pytest.mark.spec("SCH-12")
async def test_after_the_grace_running_tasks_are_cancelled_and_given_back(rig):
    """After the grace period an async task is cancelled, its run is recorded as interrupted, no attempt is used up."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop(grace_s=30))
    await quiet()
    await rig.advance(29)
    assert work.cancelled == []
    await rig.advance(1)
    await stopping
    record = await rig.found(uuid)
    [run] = await rig.store.list_attempts(uuid)
    assert work.cancelled == [uuid]
    assert (record.state, record.attempt, run.state) == ("queued", 0, "interrupted")
    assert await rig.store.nodes() == []


@pytest.mark.spec("SCH-12")
async def test_an_error_while_being_cut_short_is_no_failure(rig):
    """A task that raises when a stop cuts it short is given back, not failed."""

    async def stubborn(record) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("cut short") from None

    rig.consumer("stubborn", stubborn)
    uuid = await rig.submit("stubborn")
    await quiet()
    await rig.engine.stop(grace_s=0)
    record = await rig.found(uuid)
    assert (record.state, record.attempt) == ("queued", 0)


@pytest.mark.spec("SCH-12")
async def test_a_thread_that_cannot_be_stopped_stays_claimed(rig):
    """A thread still running after the grace keeps its claim, and the node stays joined; nothing runs it twice."""
    go_on = threading.Event()

    def deaf(record) -> None:
        go_on.wait(10)

    rig.consumer("deaf", deaf)
    uuid = await rig.submit("deaf")
    await quiet()
    stopping = asyncio.create_task(rig.engine.stop(grace_s=1))
    await quiet()
    await rig.advance(1)
    await rig.advance(5)
    await stopping
    assert await rig.state(uuid) == "running"
    assert len(await rig.store.nodes()) == 1
    go_on.set()
    await until_threads_end()
    assert await rig.state(uuid) == "running"


async def test_a_thread_that_listens_is_given_back(rig):
    """A thread that looks at `cancelled` and raises when the grace is over goes back to the queue."""
    from taskyard.execution.context import current_run

    began = threading.Event()

    def listening(record) -> None:
        began.set()
        run = current_run()
        while not run.cancelled:
            threading.Event().wait(0.001)
        raise InterruptedError

    rig.consumer("listening", listening)
    uuid = await rig.submit("listening")
    await asyncio.to_thread(began.wait)
    await rig.engine.stop(grace_s=0)
    record = await rig.found(uuid)
    assert (record.state, record.attempt) == ("queued", 0)
    assert await rig.store.nodes() == []


async def test_what_ended_is_written_before_stop_returns(rig):
    """stop() returns only when every ended run is recorded, even if the store stumbles meanwhile."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    rig.store.away = StoreUnavailable("gone")
    work.let_go(uuid)
    stopping = asyncio.create_task(rig.engine.stop())
    await quiet()
    assert not stopping.done()
    rig.store.away = None
    await rig.advance(2)
    await stopping
    assert await rig.state(uuid) == "completed"
    assert rig.engine.is_recorded


async def test_what_was_handed_in_before_a_stop_is_stored(rig):
    """Tasks that were handed in when stop() was called are stored, and their submitter is answered."""
    adding = [rig.offer(rig.record("work")) for _ in range(3)]
    await rig.engine.stop()
    assert [len(await one) for one in adding] == [1, 1, 1]
    assert await rig.store.count() == {("default", "queued"): 3}


class Warm(InProcessExecutor):
    """One that can be seen to be open, as a pool of processes can."""

    is_open = False

    async def start(self) -> None:
        await super().start()
        self.is_open = True

    async def shutdown(self, *, wait: bool = True) -> None:
        await super().shutdown(wait=wait)
        self.is_open = False


async def test_a_start_that_failed_can_be_tried_again():
    """When the store refuses the node, start() raises, leaves no executor open, and works when the store is back."""
    rig = Rig()
    rig.executors["warm"] = warm = Warm()
    rig.store.refuses_nodes = True
    with pytest.raises(StoreUnavailable):
        await rig.engine.start()
    assert not warm.is_open
    rig.store.refuses_nodes = False
    await rig.engine.start()
    assert warm.is_open
    assert len(await rig.store.nodes()) == 1
    await rig.engine.stop()


async def test_a_store_that_stays_away_does_not_hold_stop_for_ever(rig, caplog):
    """When the store does not come back, stop() gives up after a few seconds, says so, and stays joined."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    rig.store.away = StoreUnavailable("gone")
    work.let_go(uuid)
    stopping = asyncio.create_task(rig.engine.stop())
    for _ in range(10):
        await rig.advance(1)
    await stopping
    assert "not recorded" in caplog.text
    assert not rig.engine.is_recorded
    assert await rig.state(uuid) == "running"
    assert len(await rig.store.nodes()) == 1


async def test_after_stop_nothing_is_taken(rig):
    """A stopped engine refuses tasks and waiters, and does not start again."""
    await rig.engine.stop()
    with pytest.raises(NotOpen):
        await rig.submit("work")
    with pytest.raises(NotOpen):
        await rig.engine.outcome("x")
    with pytest.raises(NotOpen):
        await rig.engine.start()
    await rig.engine.stop()


async def test_those_who_wait_are_told_of_the_stop(rig):
    """Whoever waits for a result when the engine stops is told, and does not wait for ever."""
    uuid = await rig.submit("nobody")
    waiting = asyncio.create_task(rig.outcome(uuid))
    await quiet()
    await rig.engine.stop()
    with pytest.raises(NotOpen):
        await waiting


async def test_submit_only(start_rig):
    """An engine that does not serve joins no node and claims nothing, but submits, and sees results made elsewhere."""
    serving: Rig = await start_rig()
    work = Work()
    serving.consumer("work", work)
    submitting: Rig = await start_rig(store=serving.store, clock=serving.clock, serve=False)
    submitting.consumer("work", work)
    uuid = await submitting.submit("work")
    waiting = asyncio.create_task(submitting.outcome(uuid))
    await quiet()
    assert await submitting.state(uuid) == "queued"
    assert len(await serving.store.nodes()) == 1
    serving.store.hint()
    await quiet()
    work.let_go(uuid)
    await quiet()
    serving.store.hint()
    assert (await waiting).state == "completed"


async def until_threads_end() -> None:
    """The worker threads have nothing left to do and are gone."""
    for thread in threading.enumerate():
        if thread.name.startswith("taskyard-thread"):
            await asyncio.to_thread(thread.join, 5)


def test_a_rig_needs_no_loop_to_be_made():
    """An engine can be made outside an event loop, before it is started inside one."""
    rig = Rig()
    assert isinstance(rig.store, ShakyStore)
