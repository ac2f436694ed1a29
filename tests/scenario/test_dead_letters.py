"""Failed tasks: seen by what they have in common, and sent again."""

import pytest

from taskyard import RetryPolicy, TaskFailed, TaskFilter, TaskState, Yard

ONCE_MORE = RetryPolicy(max_retries=1, first_s=0.01, jitter=0)


def build(url: str) -> tuple[Yard, set[str]]:
    """A yard, and the names of the hosts that are down."""
    yard = Yard(url)
    down = {"a", "b", "c"}

    @yard.consumer(concurrent_count=5, retry=ONCE_MORE)
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
        assert [run.error.message for run in await yard.runs(a) if run.error is not None] == ["a is away"] * 2
        down.clear()
        await yard.retry(a)
        assert await yard.handle(a).result(timeout_s=30) == "a"
        report = await yard.matching(TaskFilter(states=(TaskState.FAILED,), error="OSError")).retry()
        assert (report.matched, report.moved) == (2, 2)
        for record in await yard.store.list_tasks(TaskFilter(source="fetch")):
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
