"""What becomes of a task, as its submitter and its own code see it: results, errors, progress, steering, children."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from taskyard import (
    Cancel,
    EventKind,
    ResultGone,
    RetryLater,
    RetryPolicy,
    TaskCanceled,
    TaskFailed,
    TaskState,
    Yard,
    current_run,
)
from taskyard.errors import NoCurrentRun, NotOpen, UnknownTask
from taskyard.model.notes import Note
from tests.scenario.gates import heard, told
from tests.scenario.jobs import build

VALUES: list[Any] = [None, True, 7, 1.5, "text", [1, [2, None]], {"a": {"b": []}}, "ÄÖ 漢字 \u0000 🚂"]


@pytest.mark.parametrize("value", VALUES)
async def test_a_result_comes_back_as_it_was(url, value):
    """Whatever JSON can carry comes back from a task as it went in."""
    async with build(url) as yard:
        assert await (await yard.submit("echo", {"value": value})).result(timeout_s=10) == value


async def test_a_result_can_be_asked_for_again(url):
    """A result stays: it is there for a second question, for many at once, and for a handle made of the id alone."""
    async with build(url) as yard:
        handle = await yard.submit("add", {"a": 2, "b": 3})
        results = await asyncio.gather(*(handle.result(timeout_s=10) for _ in range(20)))
        assert results == [5] * 20
        assert await yard.handle(handle.uuid).result(timeout_s=10) == 5


async def test_a_failure_says_what_happened(url):
    """TaskFailed carries the kind, the class, the message and the traceback of what the consumer raised."""
    yard = Yard(url)

    @yard.consumer
    async def divide(by: int) -> float:
        return 1 / by

    @yard.consumer
    async def parse(text: str) -> int:
        return int(text)

    async with yard:
        handle = await parse.submit("seven")
        with pytest.raises(TaskFailed, match="invalid literal for int") as failed:
            await handle.result(timeout_s=10)
        assert (failed.value.uuid, failed.value.kind, failed.value.error_type) == (handle.uuid, "runtime", "ValueError")
        assert "return int(text)" in (failed.value.traceback or "")
        record = await handle.record()
        assert record.error is not None
        assert (record.state, record.attempt) == (TaskState.FAILED, 1)
        assert await (await divide.submit(4)).result(timeout_s=10) == 0.25


async def test_waiting_may_end_before_the_task(url, gates):
    """result(timeout_s=…) gives up waiting, not the task: it goes on and its result can be had later."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "slow"})
        run = await gates.begun("slow")
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.02 s; it goes on"):
            await handle.result(timeout_s=0.02)
        run.finish("after all")
        assert await handle.result(timeout_s=10) == "after all"


@pytest.mark.parametrize("uuid", ["01890000-0000-7000-8000-000000000000", "garbage"])
async def test_a_task_that_is_not_there(url, uuid):
    """An id the store does not know is answered at once, by an error that says so."""
    async with build(url) as yard:
        stranger = yard.handle(uuid)
        with pytest.raises(ResultGone, match=r"never submitted here, .* ended so long ago .* check the id"):
            await stranger.result(timeout_s=10)
        with pytest.raises(UnknownTask, match=r"never submitted here, .*, or its record was pruned"):
            await stranger.record()
        with pytest.raises(UnknownTask):
            await stranger.cancel()


async def test_a_handle_can_be_made_of_a_uuid(url):
    """An id is taken as a text or as a `uuid.UUID`, for looking and for steering."""
    async with build(url) as yard:
        handle = await yard.submit("echo", {"value": 7})
        known = UUID(handle.uuid)
        assert yard.handle(known) == handle
        assert await yard.handle(known).result(timeout_s=10) == 7
        waiting = await yard.submit("echo", delay_s=3600)
        assert (await yard.cancel(UUID(waiting.uuid))).state is TaskState.CANCELED


async def test_a_closed_yard_says_that_it_is_closed(url, gates):
    """Before it is opened and after it is closed, a yard refuses with NotOpen, also those who were waiting."""
    yard = build(url, gates.port)
    with pytest.raises(NotOpen, match="async with yard"):
        await yard.submit("echo")
    async with yard:
        handle = await yard.submit("echo", delay_s=3600)
        waiting = asyncio.create_task(handle.result())
        await asyncio.sleep(0)
    with pytest.raises(NotOpen, match="the task goes on"):
        await waiting
    with pytest.raises(NotOpen):
        await yard.submit("echo")


# --- the run seen from inside -----------------------------------------------------------------------------------------


async def test_a_run_knows_itself(url):
    """current_run() tells the task, the attempt, the source, and a token that only grows; outside there is none."""
    yard = Yard(url)
    seen: list[tuple[str, int, int, str]] = []

    def look() -> None:
        run = current_run()
        seen.append((run.uuid, run.attempt, run.token, run.source))
        if run.attempt == 1:
            raise RetryLater(0)

    @yard.consumer
    async def on_the_loop() -> None:
        look()

    @yard.consumer
    def in_a_thread() -> None:
        look()

    async with yard:
        for consumer in (on_the_loop, in_a_thread):
            handle = await consumer.submit()
            await handle.result(timeout_s=10)
            (uuid, first, low, name), (same, second, high, _) = seen[-2:]
            assert (uuid, same, name) == (handle.uuid, handle.uuid, consumer.__name__)
            assert (first, second) == (1, 2)
            assert low < high
        with pytest.raises(NoCurrentRun, match="only inside a consumer"):
            current_run()


@pytest.mark.spec("QUE-25")
@pytest.mark.parametrize("source", ["gate", "thread_gate"])
async def test_progress_is_seen_while_it_runs(url, gates, source):
    """What a run says of its progress, from the loop or a thread, is on its record while it still runs."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit(source, {"name": "long"})
        run = await gates.begun("long")
        run.progress(0.5, "half way", rate=12.5)
        await heard(yard, EventKind.PROGRESS, handle.uuid)
        record = await handle.record()
        assert record.state is TaskState.RUNNING
        assert record.progress is not None
        said = record.progress
        assert (said.fraction, said.message, said.rate) == (0.5, "half way", 12.5)
        run.finish()
        await handle.result(timeout_s=10)


@pytest.mark.parametrize("source", ["gate", "thread_gate"])
async def test_retry_later_uses_up_no_retry(url, gates, source):
    """RetryLater sends the task back to wait, without an error in the log, a used retry or a held slot."""
    async with build(url, gates.port, each=1) as yard:
        handle = await yard.submit(source, {"name": "shy"})
        (await gates.begun("shy")).later(0.1)
        await heard(yard, EventKind.RETRYING, handle.uuid)
        await yard.submit(source, {"name": "other"})
        (await gates.begun("other")).finish()
        again = await gates.begun("shy")
        assert again.attempt == 2
        again.finish("now")
        assert await handle.result(timeout_s=10) == "now"
        record = await handle.record()
        assert (record.attempt, record.retries) == (2, 0)


async def test_a_consumer_can_cancel_itself(url, caplog):
    """Raising Cancel ends the task as canceled, with the reason, and is not logged as a failure."""
    yard = Yard(url)

    @yard.consumer
    async def doubtful() -> None:
        raise Cancel("nothing to do on Sundays")

    async with yard:
        handle = await doubtful.submit()
        with pytest.raises(TaskCanceled, match="nothing to do on Sundays"):
            await handle.result(timeout_s=10)
        assert await handle.state() is TaskState.CANCELED
    assert "[fail]" not in caplog.text


async def test_a_note_stays_on_the_record(url, gates):
    """What a run notes is on the task's record."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "talkative"})
        run = await gates.begun("talkative")
        run.note("took the scenic route")
        run.finish()
        await handle.result(timeout_s=10)
        assert (await handle.record()).note == Note.remark("took the scenic route")


async def test_a_timeout_ends_an_async_task(url):
    """A task that runs longer than its timeout is cut off and fails with kind timeout, when its retries are used up."""
    yard = Yard(url)
    ended = asyncio.Event()

    @yard.consumer(timeout_s=60)
    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with yard:
        handle = await endless.options(timeout_s=0.05, retry=RetryPolicy(max_retries=0)).submit()
        with pytest.raises(TaskFailed, match=r"longer than its timeout of 0\.05 s") as failed:
            await handle.result(timeout_s=10)
        assert failed.value.kind == "timeout"
        assert ended.is_set()


# --- children ---------------------------------------------------------------------------------------------------------


async def test_a_task_submits_others(url):
    """A running task may submit others and wait for them."""
    yard = Yard(url)

    @yard.consumer(concurrency=10)
    async def square(n: int) -> int:
        return n * n

    @yard.consumer
    async def total(upto: int) -> int:
        children = await square.submit_many([{"n": n} for n in range(upto)])
        return sum([await child.result(timeout_s=10) for child in children])

    async with yard:
        assert await (await total.submit(5)).result(timeout_s=10) == 30


async def test_a_task_in_a_thread_submits_others(url):
    """A plain function submits through the yard's blocking face, from the thread it runs in."""
    yard = Yard(url)

    @yard.consumer
    async def child(text: str) -> str:
        return text.upper()

    @yard.consumer
    def parent(text: str) -> Any:
        with yard.blocking() as sync:
            return sync.result(sync.submit("child", {"text": text}), timeout_s=10)

    async with yard:
        assert await (await parent.submit("yes")).result(timeout_s=10) == "YES"


async def test_leaving_the_block_lets_what_runs_finish(url, gates):
    """`async with yard:` waits at its end for what runs; what waits stays in the store."""
    yard = build(url, gates.port, queues={"q": {"concurrency": 1}})
    await yard.start()
    running, waiting = [await yard.submit("gate", {"name": name}, queue="q") for name in ("running", "waiting")]
    run = await gates.begun("running")
    store = yard.store
    closing = asyncio.create_task(yard.stop())
    run.finish("done")
    await closing
    if url == "memory://":
        assert [o.state for o in await store.outcomes([running.uuid, waiting.uuid]) if o] == ["completed", "queued"]
    else:
        async with yard.client():
            assert await running.result(timeout_s=10) == "done"
            assert await waiting.state() is TaskState.QUEUED


@pytest.mark.spec("SCH-12")
async def test_what_a_stop_interrupts_is_given_back(file_url, gates):
    """After the grace a stopping yard interrupts what runs; the run is recorded as interrupted, uses up no attempt, and
    the task runs again when a yard is opened."""
    async with build(file_url, gates.port, grace_s=0.05) as yard:
        handle = await yard.submit("gate", {"name": "long"})
        run = await gates.begun("long")
    await run.gone()
    async with yard:
        again = await gates.begun("long")
        assert (again.attempt, again.token > run.token) == (1, True)
        [cut_short, *_] = await yard.store.list_attempts(handle.uuid)
        assert cut_short.state is TaskState.INTERRUPTED
        again.finish()
        await handle.result(timeout_s=10)
        assert await told(yard, handle.uuid) == ["submitted", "running", "queued", "running", "completed"]
