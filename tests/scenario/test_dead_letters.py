"""Failed tasks: seen by what they have in common, and sent again."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from taskyard import (
    BaseTaskConsumer,
    InvalidInput,
    RerunReport,
    RetryPolicy,
    Task,
    TaskFailed,
    TaskFilter,
    TaskState,
    Yard,
    rerunning,
)
from taskyard.errors import PayloadTooLarge
from taskyard.model.notes import NoteCode

ONCE_MORE = RetryPolicy(max_retries=1, first_s=0.01, jitter=0)


def build(url: str) -> tuple[Yard, set[str]]:
    """A yard, and the names of the hosts that are down."""
    yard = Yard(url)
    down = {"a", "b", "c"}

    @yard.consumer(concurrency=5, retry=ONCE_MORE)
    async def fetch(host: str) -> str:
        if host in down:
            raise ConnectionError(f"{host} is away")
        if host == "typo":
            raise ValueError("no such host")
        return host

    return yard, down


async def fail(yard: Yard, *hosts: str) -> list[str]:
    handles = await yard.submit_many("fetch", [{"host": host} for host in hosts])
    for handle in handles:
        with pytest.raises(TaskFailed):
            await handle.result(timeout_s=30)
    return [handle.uuid for handle in handles]


@pytest.mark.spec("SCH-13")
async def test_dead_letters_are_looked_at_and_sent_again(url):
    """Grouped by error, with the error of every attempt; one, or all of one error, are sent again and complete."""
    yard, down = build(url)
    async with yard:
        a, _, _, typo = await fail(yard, "a", "b", "c", "typo")
        groups = await yard.failures()
        assert [(group.error, group.count) for group in groups] == [("ConnectionError", 3), ("ValueError", 1)]
        assert groups[1].uuid == typo
        assert [run.error.message for run in await yard.attempts(a) if run.error is not None] == ["a is away"] * 2
        down.clear()
        await yard.retry(a)
        assert await yard.handle(a).result(timeout_s=30) == "a"
        report = await yard.matching(TaskFilter(states=(TaskState.FAILED,), error="OSError")).retry()
        assert (report.matched, report.moved) == (2, 2)
        for record in await yard.store.list_tasks(TaskFilter(consumer="fetch")):
            if record.uuid != typo:
                await yard.handle(record.uuid).result(timeout_s=30)
        assert [group.uuid for group in await yard.failures()] == [typo]


@pytest.mark.spec("SCH-13")
async def test_a_dead_letter_is_run_again_with_other_arguments(url):
    """A failed task makes a new one, with arguments checked by its consumer, which names the old as its origin."""
    yard, _ = build(url)
    async with yard:
        (typo,) = await fail(yard, "typo")
        again = await yard.run_again(typo, {"host": "right"})
        assert await again.result(timeout_s=30) == "right"
        assert (await again.record()).origin == typo
        assert await yard.handle(typo).state() is TaskState.FAILED


@pytest.mark.spec("SCH-13")
async def test_all_dead_letters_are_run_again_with_an_argument_changed(url):
    """Of all that match new tasks are made, oldest first, each with its other arguments as they were; a dry run counts
    the same, and what the consumer refuses is told by why."""
    yard = Yard(url)

    @yard.consumer(concurrency=5, retry=RetryPolicy(max_retries=0))
    async def fetch(host: str, n: int) -> str:
        if host == "typo":
            raise ValueError("no such host")
        return f"{host} {n}"

    async with yard:
        handles = await yard.submit_many("fetch", [{"host": "typo", "n": n} for n in range(3)])
        for handle in handles:
            with pytest.raises(TaskFailed):
                await handle.result(timeout_s=30)
        failed = TaskFilter(states=(TaskState.FAILED,), error="ValueError")
        assert (await yard.run_all_again(failed, changes={"host": "right"}, dry_run=True)).matched == 3
        wrong = await yard.run_all_again(failed, changes={"hots": "right"})
        assert (wrong.matched, wrong.moved, list(wrong.unfit.values())) == (3, 0, [3])
        report = await yard.run_all_again(failed, changes={"host": "right"})
        assert (report.matched, report.moved, report.refused) == (3, 3, 0)
        new = [record for record in await yard.store.list_tasks() if record.origin is not None][::-1]
        assert [record.origin for record in new] == [handle.uuid for handle in handles]
        results = [await yard.handle(record.uuid).result(timeout_s=30) for record in new]
        assert results == ["right 0", "right 1", "right 2"]


async def test_what_was_run_again_before_an_interrupt_is_known(url, monkeypatch):
    """Who is interrupted while many are run again has heard how far it came, and so many new tasks there are."""
    monkeypatch.setattr(rerunning, "BATCH", 2)
    async with Yard(url) as yard:

        @yard.consumer
        async def fetch(n: int) -> int:
            return n

        for handle in await yard.submit_many("fetch", [{"n": n} for n in range(7)]):
            await handle.result(timeout_s=30)
        heard: list[RerunReport] = []

        def hear(report: RerunReport) -> None:
            heard.append(report)
            if len(heard) == 2:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await yard.run_all_again(so_far=hear)
        assert [(report.matched, report.moved) for report in heard] == [(7, 2), (7, 4)]
        made = [record.uuid for record in await yard.store.list_tasks() if record.origin is not None][::-1]
        assert list(heard[-1].made) == made
        assert len(made) == 4


@pytest.mark.spec("SCH-13")
async def test_to_run_all_again_twice_runs_nothing_twice(url):
    """The same call again leaves out those of which a new task was made, so that it goes on where it was interrupted;
    a new one that failed in its turn is run again like any other; who wants a repetition says so."""
    async with Yard(url) as yard:

        @yard.consumer(retry=RetryPolicy(max_retries=0))
        async def fetch(n: int) -> int:
            raise OSError("away")

        async def ended(uuids: Iterable[str]) -> None:
            for uuid in uuids:
                with pytest.raises(TaskFailed):
                    await yard.handle(uuid).result(timeout_s=30)

        await ended(handle.uuid for handle in await yard.submit_many("fetch", [{"n": n} for n in range(3)]))
        away = TaskFilter(error="OSError")
        first = await yard.run_all_again(away)
        assert (first.matched, first.moved, first.run_again) == (3, 3, 0)
        await ended(first.made)
        assert await yard.run_all_again(away, dry_run=True) == RerunReport(matched=3, run_again=3)
        second = await yard.run_all_again(away)
        assert (second.moved, second.run_again) == (3, 3)
        origins = [(await yard.handle(uuid).record()).origin for uuid in second.made]
        assert tuple(origins) == first.made
        await ended(second.made)
        assert (await yard.run_all_again(away, repeat=True, dry_run=True)).matched == 9


@pytest.mark.spec("SCH-13")
async def test_two_who_run_all_again_at_once_run_each_once(url):
    """Of each failed task one new one is made, also if that has ended before the second comes to it; who was second
    counts it among those that were run again before."""
    yard, down = build(url)
    async with yard:
        failed = await fail(yard, *["a"] * 150)
        down.clear()
        away = TaskFilter(error="ConnectionError")
        reports = await asyncio.gather(*(yard.run_all_again(away) for _ in range(3)))
        made = [uuid for report in reports for uuid in report.made]
        origins = [(await yard.handle(uuid).record()).origin for uuid in made]
        assert (len(origins), set(origins)) == (150, set(failed))
        for report in reports:
            assert report.matched == report.moved == len(report.made)
            assert (report.matched + report.run_again, report.refused) == (150, 0)
        assert len((await yard.run_all_again(away, repeat=True)).made) == 150


async def who_ran_again(yard: Yard, uuid: str) -> str | None:
    note = (await yard.handle(uuid).record()).note
    assert note is None or note.code is NoteCode.RUN_AGAIN
    return None if note is None else note.actor


async def test_who_ran_it_again_is_noted(url):
    """The new task says who asked for it, as one that is sent again does, for as long as it waits; nobody is named
    where nobody says."""
    yard, _ = build(url)
    async with yard:
        a, b, c = await fail(yard, "a", "b", "c")
        await yard.queue().pause()
        made = [
            await yard.run_again(a, by="ann"),
            await yard.run_again(b, {"host": "x"}, by="bob"),
            await yard.run_again(c),
        ]
        assert [await who_ran_again(yard, task.uuid) for task in made] == ["ann", "bob", None]
        away = TaskFilter(error="ConnectionError")
        many = (await yard.run_all_again(away, repeat=True, by="cid")).made
        assert [await who_ran_again(yard, uuid) for uuid in many] == ["cid"] * 3
        with pytest.raises(InvalidInput, match="by must be a string of 1 to 200 characters"):
            await yard.run_all_again(away, by="x" * 201)
        await yard.queue().resume()
        assert await made[1].result(timeout_s=30) == "x"
        assert (await made[1].record()).note is None


@pytest.mark.spec("QUE-15")
async def test_a_task_that_is_run_again_is_made_as_a_submitted_one(url):
    """Other arguments go through `produce` and are held to the limit of size; changes are made to what it made once."""
    yard = Yard(url, max_payload_bytes=1000)

    class Fetch(BaseTaskConsumer):
        name = "fetch"

        def produce(self, args: dict[str, Any]) -> Task:
            return Task(source=self.name, args={"path": f"/{args['name']}", "size": 1})

        async def consume(self, task: Task) -> Any:
            return task.args

    yard.register(Fetch())
    async with yard:
        old = await yard.submit("fetch", {"name": "a"})
        assert await old.result(timeout_s=30) == {"path": "/a", "size": 1}
        other = await yard.run_again(old.uuid, {"name": "b"})
        assert await other.result(timeout_s=30) == {"path": "/b", "size": 1}
        changed = await yard.run_again(other.uuid, changes={"size": 2})
        assert await changed.result(timeout_s=30) == {"path": "/b", "size": 2}
        large: list[dict[str, Any]] = [{"args": {"name": "x" * 1000}}, {"changes": {"path": "x" * 1000}}]
        for too_large in large:
            with pytest.raises(PayloadTooLarge):
                await yard.run_again(old.uuid, **too_large)
        with pytest.raises(InvalidInput, match="not both"):
            await yard.run_again(old.uuid, {}, changes={})


@pytest.mark.spec("QUE-15", "QUE-27")
async def test_a_summary_that_is_run_again_gets_the_results(url):
    """Run again with its own arguments or with others, a summary gets what the tasks of its group returned."""
    yard = Yard(url)

    @yard.consumer
    async def double(n: int) -> int:
        return 2 * n

    @yard.consumer
    async def total(results: list[int], more: int = 0) -> int:
        return sum(results) + more

    async with yard:
        group = await yard.submit_group([double.bind(n) for n in range(4)], summary=total.bind())
        assert await group.summary.result(timeout_s=30) == 12
        again = await yard.run_again(group.id)
        more = await yard.run_again(group.id, {"more": 1})
        changed = await yard.run_again(group.id, changes={"more": 2})
        assert [await one.result(timeout_s=30) for one in (again, more, changed)] == [12, 13, 14]
