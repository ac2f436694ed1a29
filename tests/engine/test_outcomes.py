"""Waiting for results: told by this node without asking, found out by hints otherwise, and nothing left behind."""

import asyncio

import pytest

from taskyard.errors import OutcomeUnknown, ResultGone, StoreUnavailable
from taskyard.model.command import Cancel, Retry
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.ports.store import Add
from tests.engine.support import Rig, Work, quiet


async def run_elsewhere(rig: Rig, source: str = "elsewhere") -> None:
    """Another node takes all tasks of `source` and completes them."""
    claims = (await rig.store.turn("other", demand=Demand(1000, {source: 1000}))).claims
    settles = [(claim, Move.completed(at=rig.clock.now(), result='"there"')) for claim in claims]
    await rig.store.turn("other", settles=settles)


async def test_what_ends_here_is_told_without_asking(rig):
    """A task that ends on this node while it is waited for resolves its waiters without another question."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    waiting = [asyncio.create_task(rig.outcome(uuid)) for _ in range(3)]
    await quiet()
    asked = list(rig.store.asked)
    work.let_go(uuid)
    assert {(await waiter).state for waiter in waiting} == {"completed"}
    assert rig.store.asked == asked


async def test_a_settle_that_was_written_unheard(rig):
    """When the answer to a settle is lost and the next one says that the claim is spent, waiters are told the end."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    waiting = asyncio.create_task(rig.outcome(uuid))
    await quiet()
    rig.store.unanswered = OutcomeUnknown("power")
    work.let_go(uuid)
    await quiet()
    await rig.advance(2)
    assert (await waiting).state == "completed"


async def test_what_ended_before_is_found(rig):
    """Waiting for a task that has ended already answers at once."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    work.let_go(uuid)
    await quiet()
    assert (await rig.outcome(uuid)).result == f'"{uuid}"'


async def test_many_waiters_ask_together(rig):
    """Waiters that begin together share a question, in parts of at most 500."""
    uuids = await rig.submit_many("elsewhere", 1200)
    waiting = [asyncio.create_task(rig.outcome(uuid)) for uuid in uuids]
    await quiet()
    assert rig.store.asked == [500, 500, 200]
    await run_elsewhere(rig)
    await run_elsewhere(rig)
    rig.store.hint()
    assert {outcome.result for outcome in await asyncio.gather(*waiting)} == {'"there"'}


async def test_only_what_ended_is_asked_for(rig):
    """After a hint only the tasks that the events name are asked for, not all that are waited for."""
    uuids = await rig.submit_many("never", 50)
    other = await rig.submit("elsewhere")
    waiting = [asyncio.create_task(rig.outcome(uuid)) for uuid in [*uuids, other]]
    await quiet()
    rig.store.asked.clear()
    rig.store.hint()
    await quiet()
    await run_elsewhere(rig)
    rig.store.hint()
    assert (await waiting[-1]).result == '"there"'
    assert rig.store.asked == [1]
    for waiter in waiting[:-1]:
        waiter.cancel()


async def test_events_that_were_trimmed_make_it_ask_for_all(rig):
    """A watcher that fell behind the ring of events asks for everything it waits for."""
    uuid = await rig.submit("elsewhere")
    waiting = asyncio.create_task(rig.outcome(uuid))
    await quiet()
    await run_elsewhere(rig)
    for _ in range(12):
        await rig.store.turn("other", adds=[Add([rig.record("noise") for _ in range(1000)])])
    rig.store.hint()
    assert (await waiting).state == "completed"


async def test_an_unknown_task_is_gone(rig):
    """Waiting for a task that the store does not know raises ResultGone."""
    with pytest.raises(ResultGone):
        await rig.outcome("01890000-0000-7000-8000-000000000000")


async def test_a_wait_that_began_before_its_task_was_stored_harms_no_later_one(rig):
    """Who waits once the task is stored is not told that it is gone, though the store was asked before it came."""
    record = rig.record("never")
    rig.store.outcomes_held = asyncio.Event()
    early = asyncio.create_task(rig.outcome(record.uuid))
    await quiet()
    await rig.offer(record)
    late = [asyncio.create_task(rig.outcome(record.uuid)) for _ in range(2)]
    await quiet()
    rig.store.outcomes_held.set()
    with pytest.raises(ResultGone):
        await early
    await rig.engine.apply([record.uuid], Cancel())
    assert {(await waiter).state for waiter in late} == {"canceled"}


async def test_waiters_that_gave_up_leave_nothing(rig):
    """A waiter that is cancelled is forgotten; the others on the same task are not."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    one, two = [asyncio.create_task(rig.outcome(uuid)) for _ in range(2)]
    lone = asyncio.create_task(rig.outcome(await rig.submit("never")))
    await quiet()
    one.cancel()
    lone.cancel()
    await quiet()
    assert list(rig.engine._watcher._waiting) == [uuid]
    work.let_go(uuid)
    assert (await two).state == "completed"
    assert not rig.engine._watcher._waiting


async def test_a_failed_task_sent_again(rig):
    """A waiter gets the end it saw; who waits after the task was sent again gets the next one."""
    ends = [ValueError("first"), None]

    async def second_time(record) -> str:
        if (error := ends.pop(0)) is not None:
            raise error
        return "ok"

    rig.consumer("second_time", second_time)
    uuid = await rig.submit("second_time")
    assert (await rig.outcome(uuid)).state == "failed"
    await rig.engine.apply([uuid], Retry())
    assert (await rig.outcome(uuid)).state == "completed"


async def test_waiting_through_an_outage(rig):
    """A wait that begins while the store is away is answered when it is back."""
    uuid = await rig.submit("elsewhere")
    await run_elsewhere(rig)
    rig.store.away = StoreUnavailable("gone")
    waiting = asyncio.create_task(rig.outcome(uuid))
    for _ in range(5):
        await rig.advance(1)
    rig.store.away = None
    for _ in range(10):
        await rig.advance(1)
    assert (await waiting).state == "completed"


async def test_a_command_of_another_process_is_seen(rig):
    """A waiter is told when another process cancels the task in the store."""
    uuid = await rig.submit("never")
    waiting = asyncio.create_task(rig.outcome(uuid))
    await quiet()
    await rig.store.apply([uuid], Cancel("not wanted"))
    rig.store.hint()
    outcome = await waiting
    assert outcome.state == "canceled"
