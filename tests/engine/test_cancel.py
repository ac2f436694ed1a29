"""Cancelling: what waits leaves at once, what runs is asked, and no cancel is ever swallowed."""

import asyncio
import random
import threading
from collections import Counter

import pytest

from taskyard.errors import OutcomeUnknown
from taskyard.execution.context import current_run
from taskyard.model.command import Cancel
from taskyard.model.notes import NoteCode
from tests.engine.support import Rig, Work, quiet


async def cancel(rig: Rig, uuid: str) -> None:
    [applied] = await rig.engine.apply([uuid], Cancel())
    assert applied.refused is None


@pytest.mark.spec("QUE-11")
async def test_a_queued_task_leaves_as_canceled(rig):
    """A queued task that is canceled never runs, ends as canceled, and its waiters are told."""
    work = Work()
    rig.consumer("work", work)
    first, second, third = await rig.submit_many("work", 3)
    waiting = asyncio.create_task(rig.outcome(second))
    await quiet()
    await cancel(rig, second)
    assert (await waiting).state == "canceled"
    work.let_go(first)
    await quiet()
    assert work.began == [first, third]


@pytest.mark.spec("QUE-11")
async def test_a_scheduled_task_is_canceled_before_its_time(rig):
    """A task that waits for its time can be canceled, and does not fire."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work", in_s=5)
    await cancel(rig, uuid)
    await rig.advance(10)
    assert (await rig.state(uuid), work.began) == ("canceled", [])


@pytest.mark.spec("QUE-12", "SCH-08")
async def test_a_running_task_is_asked_to_stop_and_frees_its_slot(rig):
    """A running async task is interrupted, ends as canceled, and the next one starts the moment it has ended."""
    work = Work()
    rig.consumer("work", work)
    first, second = await rig.submit_many("work", 2)
    await quiet()
    await cancel(rig, first)
    assert (await rig.outcome(first)).state == "canceled"
    await quiet()
    assert (work.cancelled, work.began) == ([first], [first, second])


@pytest.mark.spec("QUE-12")
async def test_a_cancel_that_overtakes_its_claim(rig):
    """A cancel asked by another process after the claim's commit, and heard of before the claim, ends the run."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    rig.store.answers_held = asyncio.Event()
    record = rig.record("work")
    adding = rig.offer(record)
    await quiet()
    await rig.store.apply([record.uuid], Cancel())
    rig.store.hint()
    await quiet()
    rig.store.answers_held.set()
    await adding
    assert (await rig.outcome(record.uuid)).state == "canceled"


@pytest.mark.spec("QUE-12")
async def test_a_cancel_of_a_claim_that_went_unheard(rig):
    """A task that was claimed without our hearing of it, and canceled before it was found, never begins."""
    work = Work()
    rig.consumer("work", work)
    await quiet()
    rig.store.unanswered = OutcomeUnknown("power")
    record = rig.record("work")
    with pytest.raises(OutcomeUnknown):
        await rig.offer(record)
    await rig.store.apply([record.uuid], Cancel())
    await rig.advance(2)
    assert (await rig.state(record.uuid), work.began) == ("canceled", [])


@pytest.mark.parametrize("in_s", [0, 100], ids=["running", "scheduled"])
async def test_a_cancel_whose_caller_goes_away(rig, in_s):
    """A cancel whose caller is itself cancelled while the store works takes effect here, and waiters are told."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work", in_s=in_s)
    waiting = asyncio.create_task(rig.outcome(uuid))
    await quiet()
    go_on, apply = asyncio.Event(), rig.store.apply

    async def slowly(uuids, command, **asked):
        applied = await apply(uuids, command, **asked)
        await go_on.wait()
        return applied

    rig.store.apply = slowly
    canceling = asyncio.create_task(cancel(rig, uuid))
    await quiet()
    canceling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await canceling
    go_on.set()
    assert (await waiting).state == "canceled"


async def test_a_cancel_with_unknown_outcome(rig):
    """When the answer to a cancel is lost, those who wait for the task are told all the same."""
    rig.consumer("work", Work())
    uuid = await rig.submit("work", in_s=100)
    waiting = asyncio.create_task(rig.outcome(uuid))
    await quiet()
    apply = rig.store.apply

    async def unanswered(uuids, command, **asked):
        await apply(uuids, command, **asked)
        raise OutcomeUnknown("power")

    rig.store.apply = unanswered
    with pytest.raises(OutcomeUnknown):
        await cancel(rig, uuid)
    assert (await waiting).state == "canceled"


@pytest.mark.spec("QUE-12")
async def test_a_cancel_asked_by_another_process(rig):
    """A cancel that another process wrote into the store reaches the run by the store's hint."""
    work = Work()
    rig.consumer("work", work)
    uuid = await rig.submit("work")
    await quiet()
    await rig.store.apply([uuid], Cancel())
    await quiet()
    assert work.cancelled == []
    rig.store.hint()
    assert (await rig.outcome(uuid)).state == "canceled"
    assert work.cancelled == [uuid]


@pytest.mark.spec("QUE-12")
async def test_the_slot_is_kept_until_the_run_has_really_ended(rig):
    """While a canceled task cleans up, its slot is taken: the next one waits for it."""
    clean_up, began = asyncio.Event(), []

    async def tidy(record) -> None:
        began.append(record.uuid)
        try:
            await asyncio.Event().wait()
        finally:
            await clean_up.wait()

    rig.consumer("tidy", tidy)
    first, second = await rig.submit_many("tidy", 2)
    await quiet()
    await cancel(rig, first)
    await quiet()
    assert (await rig.state(first), began) == ("running", [first])
    clean_up.set()
    await quiet()
    assert (await rig.state(first), began) == ("canceled", [first, second])


async def test_a_cancel_that_came_too_late_is_reported(rig):
    """A task that catches the cancellation and returns is completed, and its record says that a cancel was asked."""

    async def deaf(record) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done anyway"
        return "never"

    rig.consumer("deaf", deaf)
    uuid = await rig.submit("deaf")
    await quiet()
    await cancel(rig, uuid)
    assert (await rig.outcome(uuid)).state == "completed"
    assert (await rig.found(uuid)).cancel is not None


async def test_a_second_cancel_does_not_disturb_the_clean_up(rig):
    """Only the first cancel interrupts a run: asking again leaves its clean-up alone."""
    cleaned, go_on = [], asyncio.Event()

    async def tidy(record) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go_on.wait()
            cleaned.append(record.uuid)

    rig.consumer("tidy", tidy)
    uuid = await rig.submit("tidy")
    await quiet()
    await cancel(rig, uuid)
    await quiet()
    await cancel(rig, uuid)
    rig.store.hint()
    await quiet()
    go_on.set()
    assert (await rig.outcome(uuid)).state == "canceled"
    assert cleaned == [uuid]


async def test_a_run_that_outlasts_the_grace_is_reported(start_rig):
    """When a canceled run goes on past the grace, its record says so while it runs."""
    rig = await start_rig(cancel_grace_s=0.001)
    go_on = threading.Event()

    def deaf(record) -> None:
        go_on.wait(10)

    rig.consumer("deaf", deaf)
    uuid = await rig.submit("deaf")
    await quiet()
    await cancel(rig, uuid)
    assert await rig.probes.reported.next() == [uuid]
    record = await rig.found(uuid)
    assert record.state == "running"
    assert record.note is not None
    assert (record.note.code, record.note.facts) == (NoteCode.CANCEL_OVERDUE, {"grace_s": 0.001})
    go_on.set()
    assert (await rig.outcome(uuid)).state == "completed"


async def test_a_thread_that_listens_ends_as_canceled(rig):
    """A thread that looks at `cancelled` and raises ends as canceled."""

    def listening(record) -> None:
        run = current_run()
        while not run.cancelled:
            threading.Event().wait(0.001)
        raise InterruptedError("as you wish")

    rig.consumer("listening", listening)
    uuid = await rig.submit("listening")
    await quiet()
    await cancel(rig, uuid)
    assert (await rig.outcome(uuid)).state == "canceled"


async def test_a_cancel_from_inside(rig):
    """A consumer that cancels its own task is interrupted at its next await."""

    async def suicidal(record) -> None:
        await cancel(rig, record.uuid)
        await asyncio.Event().wait()

    rig.consumer("suicidal", suicidal)
    uuid = await rig.submit("suicidal")
    assert (await rig.outcome(uuid)).state == "canceled"


async def test_an_inner_cancellation_is_a_failure(rig):
    """A CancelledError that nobody asked for is an error of the consumer, not a cancel."""

    async def leaky(record) -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    rig.consumer("leaky", leaky)
    uuid = await rig.submit("leaky")
    await quiet()
    record = await rig.found(uuid)
    assert record.state == "retrying"
    assert record.error is not None
    assert record.error.type == "CancelledError"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_every_cancel_is_honoured_or_reported(start_rig, seed):
    """P18: of thousands of races between cancel and finish, every accepted cancel ends as canceled or leaves a note."""
    rig = await start_rig(max_running=50)
    rand = random.Random(seed)

    async def work(record) -> str:
        try:
            for _ in range(rand.randrange(4)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if rand.random() < 0.5:
                raise
        return "done"

    rig.consumer("work", work, concurrency=50)

    async def race() -> tuple[str, bool]:
        uuid = await rig.submit("work")
        for _ in range(rand.randrange(6)):
            await asyncio.sleep(0)
        [applied] = await rig.engine.apply([uuid], Cancel())
        return uuid, applied.refused is None

    ends: Counter[str] = Counter()
    raced = [one for _ in range(60) for one in await asyncio.gather(*[race() for _ in range(45)])]
    for uuid, was_accepted in raced:
        record = await rig.found((await rig.outcome(uuid)).uuid)
        if not was_accepted:
            assert record.state == "completed"
            ends["too late"] += 1
        elif record.state == "canceled":
            ends["honoured"] += 1
        else:
            assert (record.state, record.cancel is None) == ("completed", False)
            ends["reported"] += 1
    assert rig.engine.running == 0
    assert min(ends["too late"], ends["honoured"], ends["reported"]) > 100, ends
