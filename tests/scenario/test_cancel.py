"""Canceling what runs: asked, stopped, reported, and the slot free the moment it has really ended."""

from __future__ import annotations

import asyncio

import pytest

from taskyard import EventKind, TaskCanceled, TaskState, Yard
from tests.scenario.gates import heard, told
from tests.scenario.jobs import build

ONE = {"zip": {"concurrency": 1}}


@pytest.mark.spec("QUE-12")
async def test_a_running_task_is_stopped_and_the_next_starts(url, gates):
    """Canceling a running async task interrupts its code, records it as canceled, and starts the next one."""
    async with build(url, gates.port, queues=ONE) as yard:
        handle, after = [await yard.submit("gate", {"name": name}, queue="zip") for name in ("long", "next")]
        run = await gates.begun("long")
        asked = await handle.cancel(reason="enough")
        assert (asked.state, asked.cancel and asked.cancel.reason) == (TaskState.RUNNING, "enough")
        await run.gone()
        with pytest.raises(TaskCanceled, match=r"was canceled: enough$"):
            await handle.result(timeout_s=10)
        (await gates.begun("next")).finish()
        await after.result(timeout_s=10)
        assert await told(yard, handle.uuid) == ["submitted", "running", "cancel_requested", "canceled"]


@pytest.mark.spec("QUE-12")
@pytest.mark.parametrize("is_running", [True, False])
async def test_a_cancel_without_a_reason_gives_none(url, gates, is_running):
    """Whoever waits for a task that was canceled without a reason is told that, and no more."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "long"}, delay_s=0 if is_running else 60)
        if is_running:
            await gates.begun("long")
        await handle.cancel()
        with pytest.raises(TaskCanceled, match=r"was canceled$") as told:
            await handle.result(timeout_s=10)
        assert told.value.reason == ""


@pytest.mark.spec("QUE-12")
async def test_a_thread_keeps_its_slot_until_it_ends(url, gates):
    """A thread cannot be stopped: it is told, its slot stays taken until it ends, and only then the next one starts."""
    async with build(url, gates.port, queues=ONE) as yard:
        handle, after = [await yard.submit("thread_gate", {"name": name}, queue="zip") for name in ("long", "next")]
        run = await gates.begun("long")
        await handle.cancel()
        await yard.submit("gate", {"name": "elsewhere"})
        (await gates.begun("elsewhere")).finish()
        assert [await one.state() for one in (handle, after)] == [TaskState.RUNNING, TaskState.QUEUED]
        run.look()
        with pytest.raises(TaskCanceled, match="it saw that it should end"):
            await handle.result(timeout_s=10)
        (await gates.begun("next")).finish()
        await after.result(timeout_s=10)
    assert gates.most_at_once == 2


@pytest.mark.spec("QUE-12")
async def test_cleaning_up_comes_before_the_slot_is_free(url):
    """A task that cleans up when it is canceled holds its slot until it is done with that."""
    yard = Yard(url)
    began, cleaning, clean = asyncio.Event(), asyncio.Event(), asyncio.Event()
    log: list[str] = []

    @yard.consumer
    async def tidy(name: str) -> None:
        log.append(f"+{name}")
        began.set()
        if name == "next":
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleaning.set()
            await clean.wait()
            log.append(f"-{name}")
            raise

    async with yard:
        handle, after = await tidy.submit("first"), await tidy.submit("next")
        await asyncio.wait_for(began.wait(), 10)
        await handle.cancel()
        await asyncio.wait_for(cleaning.wait(), 10)
        assert await after.state() is TaskState.QUEUED
        clean.set()
        await after.result(timeout_s=10)
        assert await handle.state() is TaskState.CANCELED
    assert log == ["+first", "-first", "+next"]


@pytest.mark.spec("QUE-12")
async def test_a_cancel_that_comes_too_late_is_reported(url):
    """A task that completes although it was asked to end is completed, keeps its result, and its record says so."""
    yard = Yard(url)
    began = asyncio.Event()

    @yard.consumer
    async def stubborn() -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done anyway"
        return "never"

    async with yard:
        handle = await stubborn.submit()
        await asyncio.wait_for(began.wait(), 10)
        await handle.cancel()
        assert await handle.result(timeout_s=10) == "done anyway"
        record = await handle.record()
        assert (record.state, record.cancel is None) == (TaskState.COMPLETED, False)


@pytest.mark.spec("QUE-12", "QUE-02")
async def test_a_running_task_is_canceled_from_another_process(file_url, gates, nodes):
    """A cancel that is asked in one process ends the run in another at once, and the next task starts there."""
    node = await nodes.start(file_url, queues=ONE)
    async with build(file_url, queues=ONE).client() as yard:
        handle, after = [await yard.submit("gate", {"name": name}, queue="zip") for name in ("long", "next")]
        run = await gates.begun("long")
        assert run.pid == node.pid
        asked = asyncio.get_running_loop().time()
        await handle.cancel()
        await run.gone()
        with pytest.raises(TaskCanceled):
            await handle.result(timeout_s=10)
        (await gates.begun("next")).finish(7)
        assert asyncio.get_running_loop().time() - asked < 2
        assert await after.result(timeout_s=10) == 7


@pytest.mark.spec("QUE-12")
async def test_a_task_that_waits_for_its_next_try_can_be_canceled(url, gates):
    """A task in backoff is canceled at once and not tried again."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "flaky"})
        (await gates.begun("flaky")).fail("OSError")
        await heard(yard, EventKind.RETRYING, handle.uuid)
        assert (await handle.cancel()).state is TaskState.CANCELED
        with pytest.raises(TaskCanceled):
            await handle.result(timeout_s=10)
