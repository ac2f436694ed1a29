"""The yard in code that has no event loop, and in threads beside one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from taskyard import (
    BlockingYard,
    Group,
    QueueController,
    Reason,
    TaskCanceled,
    TaskFailed,
    TaskFilter,
    TaskHandle,
    TaskState,
    Yard,
)
from taskyard.blocking_yard import BlockingGroup, BlockingMatching, BlockingQueue, BlockingSchedules
from taskyard.errors import BlockingOnLoop, NotOpen, StoreUrlInvalid, UnknownConsumer, WrongLoop
from taskyard.queueing.matching import Matching
from taskyard.schedules import Schedules
from tests.scenario.jobs import build


def test_plain_code_submits_and_waits(url):
    """`with yard.blocking()` opens the yard, workers included, for code without a loop, and closes it at the end."""
    yard = build(url)
    before = set(threading.enumerate())
    with yard.blocking() as sync:
        handle = sync.submit("add", {"a": 2}, priority="high")
        assert sync.result(handle, timeout_s=10) == 3
        assert sync.record(handle).state is TaskState.COMPLETED
        many = sync.submit_many("add", [{"a": n} for n in range(5)])
        assert [sync.result(one, timeout_s=10) for one in many] == [1, 2, 3, 4, 5]
        later = sync.submit("echo", delay_s=3600)
        assert sync.cancel(later.uuid, reason="no").state is TaskState.CANCELED
        with pytest.raises(TaskCanceled, match="no"):
            sync.result(later.uuid, timeout_s=10)
        with pytest.raises(UnknownConsumer):
            sync.submit("nobody")
        with pytest.raises(TimeoutError, match="it goes on"):
            sync.result(sync.submit("echo", delay_s=3600), timeout_s=0.01)
    assert set(threading.enumerate()) <= before
    with yard.blocking() as again:
        assert again.result(again.submit("add", {"a": 9}), timeout_s=10) == 10


def test_a_failed_task_is_sent_again_from_plain_code(url):
    """`retry` sends a failed task again, from plain code as from async code."""
    yard = Yard(url)
    fails = [ValueError("first"), None]

    @yard.consumer
    def flaky() -> str:
        error = fails.pop(0)
        if error is not None:
            raise error
        return "fine"

    with yard.blocking() as sync:
        handle = sync.submit("flaky")
        with pytest.raises(TaskFailed, match="first"):
            sync.result(handle, timeout_s=10)
        sync.retry(handle)
        assert sync.result(handle, timeout_s=10) == "fine"


def async_verbs(of: type) -> set[str]:
    return {name for name, member in inspect.getmembers(of, inspect.iscoroutinefunction) if not name.startswith("_")}


OPENS = {"start", "stop", "submit_to"}
"""What is asynchronous of a yard and no verb of its face: that is entered and left, and submits under other names."""


@pytest.mark.parametrize(
    ("face", "of"),
    [
        (BlockingYard, Yard),
        (BlockingQueue, QueueController),
        (BlockingMatching, Matching),
        (BlockingGroup, Group),
        (BlockingSchedules, Schedules),
    ],
)
def test_the_blocking_face_has_every_verb(face: type, of: type):
    """Whatever can be awaited of a yard, or of what it hands out, has a blocking form with the same arguments."""
    verbs = async_verbs(of) - (OPENS | {"register"} if of in (Yard, Schedules) else set())
    assert verbs <= set(dir(face))
    for name in verbs:
        given, wanted = inspect.signature(getattr(face, name)), inspect.signature(getattr(of, name))
        assert list(given.parameters) == list(wanted.parameters), name
        assert not inspect.iscoroutinefunction(getattr(face, name))


def test_plain_code_steers(url):
    """Tasks, queues, all that match, groups and schedules are looked at and steered from plain code."""
    yard = build(url)
    with yard.blocking() as sync:
        queue = sync.queue(by="ann")
        said = queue.pause(reason="backup").control.state_set
        assert said is not None
        assert (said.actor, said.reason) == ("ann", "backup")
        one, two, three = sync.submit_many("add", [{"a": n} for n in range(3)])
        why = sync.why(one)
        assert why is not None
        assert why.reason is Reason.QUEUE_PAUSED
        assert sync.hold(one, reason="not yet").state is TaskState.PAUSED
        assert sync.release(one.uuid).state is TaskState.QUEUED
        sync.start_now(three, by="ann")
        sync.move(two, before=one.uuid)
        assert sync.skip(two).state is TaskState.SKIPPED
        assert sync.reschedule(one, datetime(2099, 1, 1, tzinfo=UTC)).state is TaskState.SCHEDULED
        assert sync.cancel(one, force=True, by="ann").state is TaskState.CANCELED
        assert queue.matching().retry(dry_run=True).moved == 0
        assert sync.matching(TaskFilter(states=(TaskState.QUEUED,))).count() == 1
        queue.resume()
        assert sync.result(three, timeout_s=10) == 3
        assert sync.result(sync.run_again(three), timeout_s=10) == 3
        assert (sync.failures(), len(sync.attempts(three))) == ([], 1)
        group = sync.submit_group([yard.bind("add", {"a": 1}), yard.bind("add", {"a": 2})])
        assert [sync.result(task, timeout_s=10) for task in group.tasks] == [2, 3]
        assert sync.group(group.id).progress().completed == 2
        status = sync.schedules.add("often", 3600, "add", {"a": 4})
        assert len(sync.schedules.next_fires(status)) == 5
        assert sync.result(sync.schedules.run_now("often"), timeout_s=10) == 5
        assert sync.schedules.pause("often", by="ann").state.paused_by == "ann"


def test_a_yard_that_cannot_be_opened_says_so(monkeypatch):
    """If the yard cannot be opened, the error comes out of the `with`, and no thread stays behind."""
    monkeypatch.delenv("TASKYARD_STORE", raising=False)
    before = set(threading.enumerate())
    with pytest.raises(StoreUrlInvalid, match="no store was given; set TASKYARD_STORE, or pass one"), Yard().blocking():
        pass
    assert set(threading.enumerate()) <= before


def test_plain_code_may_only_submit(file_url):
    """`blocking(serve=False)` runs nothing itself: what it submits waits for a process that serves."""
    with build(file_url).blocking(serve=False) as sync:
        handle = sync.submit("add", {"a": 1})
        assert sync.set_priority(handle, "high").priority == 0
        with pytest.raises(TimeoutError):
            sync.result(handle, timeout_s=0.2)
        assert sync.record(handle).attempt == 0
    with build(file_url).blocking() as sync:
        assert sync.result(handle.uuid, timeout_s=10) == 2


@pytest.mark.spec("SCH-20")
def test_threads_open_a_yard_together(url):
    """Threads that enter a closed yard at once share it: the first opens it, and the last to leave closes it."""
    yard = build(url)
    ready = threading.Barrier(8)

    def client(n: int) -> list[int]:
        answers = []
        for m in range(5):
            ready.wait(20)
            with yard.blocking() as sync:
                answers.append(sync.result(sync.submit("add", {"a": n, "b": m}), timeout_s=20))
        return answers

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(client, range(8))) == [[n + m for m in range(5)] for n in range(8)]
    assert yard._loop is None


def test_a_task_may_block_on_its_own_yard(url):
    """A task in a thread submits through the yard it runs in, also while the one who opened that is leaving."""
    yard = Yard(url)
    submitted: list[str] = []
    began = threading.Event()

    @yard.consumer
    def parent() -> None:
        began.set()
        while yard._stopping is None:
            threading.Event().wait(0.01)
        with yard.blocking() as sync:
            submitted.append(sync.submit("parent", delay_s=60).uuid)

    with yard.blocking() as sync:
        sync.submit("parent")
        assert began.wait(10)
    assert len(submitted) == 1


def test_outside_of_its_block_it_is_not_open(url):
    """Before its block and after it, a call is refused with what to write."""
    sync = build(url).blocking()
    for _ in range(2):
        with pytest.raises(NotOpen, match=r"use it inside `with yard\.blocking\(\) as sync:`"):
            sync.submit("add", {"a": 1})
        with sync:
            assert sync.result(sync.submit("add", {"a": 1}), timeout_s=10) == 2


@pytest.mark.spec("SCH-20")
async def test_threads_submit_beside_the_loop(url):
    """While the yard is open on a loop, any number of other threads submit and wait through the same yard."""
    yard = build(url)

    def client(n: int) -> list[int]:
        with yard.blocking() as sync:
            return [sync.result(sync.submit("add", {"a": n, "b": m}), timeout_s=20) for m in range(10)]

    async with yard:
        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            answers = await asyncio.gather(*(loop.run_in_executor(threads, client, n) for n in range(8)))
        assert answers == [[n + m for m in range(10)] for n in range(8)]
        assert await yard.store.count() == {("default", TaskState.COMPLETED): 80}


async def test_another_loop_is_refused(url):
    """Awaiting a yard on another event loop than its own would hang or harm it: it raises, and the yard goes on."""
    yard = build(url)

    def elsewhere(handle: TaskHandle) -> list[str]:
        calls: list[Callable[[], Coroutine[Any, Any, object]]]
        calls = [lambda: yard.submit("echo"), handle.result, handle.record, handle.cancel, yard.stop]
        said = []
        for call in calls:
            with pytest.raises(WrongLoop) as refused:
                asyncio.run(call())
            said.append(str(refused.value))
        return said

    async with yard:
        handle = await yard.submit("add", {"a": 1})
        said = await asyncio.to_thread(elsewhere, handle)
        assert len(said) == 5
        assert all("use yard.blocking() in a thread" in one for one in said)
        assert await handle.result(timeout_s=10) == 2


async def test_blocking_on_the_loop_is_refused(url):
    """A blocking call on the loop's own thread would wait for itself: it raises, and the yard goes on."""
    async with build(url) as yard:
        with yard.blocking() as sync:
            with pytest.raises(BlockingOnLoop, match=r"submit blocks.*use the awaitable call there"):
                sync.submit("echo")
            with pytest.raises(BlockingOnLoop, match="result blocks"):
                sync.result("some-id")
        assert await yard.store.count() == {}
        assert await (await yard.submit("add", {"a": 1})).result(timeout_s=10) == 2
