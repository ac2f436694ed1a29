"""Tasks, steered by people while they wait and run, one by one and all that match."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from taskyard import InvalidInput, RetryPolicy, TaskCanceled, TaskFilter, TaskSkipped, TaskState, Yard
from taskyard.errors import CommandRefused, UnknownTask
from taskyard.model.execution import PROCESS
from tests.scenario.gates import PATIENCE_S, Gates
from tests.scenario.jobs import build

ONE = {"zip": {"concurrency": 1}}
S = TaskState


async def play(gates: Gates, count: int) -> list[str]:
    """Let so many runs begin and finish; the order in which they did."""
    names = []
    for _ in range(count):
        run = await gates.next()
        names.append(run.name)
        run.finish()
    return names


@pytest.mark.spec("QUE-06", "QUE-07", "QUE-16", "QUE-17")
async def test_a_line_is_put_in_order_by_hand(url, gates):
    """Moved, held, skipped and put on top, tasks start in the order that people made."""
    async with build(url, gates.port, queues=ONE) as yard:
        zips = yard.queue("zip", by="ann")
        a, *rest = [await yard.submit("gate", {"name": name}, queue="zip") for name in "abcdef"]
        run = await gates.begun("a")
        b, c, d, e, f = rest
        await zips.move(f.uuid, before=c.uuid)
        await zips.move(b.uuid, after=d.uuid)
        await zips.start_now(e.uuid)
        hold = (await zips.hold(c.uuid, reason="cold")).hold
        assert hold is not None
        assert (hold.actor, hold.reason) == ("ann", "cold")
        assert (await yard.skip(d.uuid)).state is S.SKIPPED
        with pytest.raises(TaskSkipped):
            await d.result(timeout_s=PATIENCE_S)
        run.finish()
        assert await play(gates, 3) == ["e", "f", "b"]
        assert await c.state() is S.PAUSED
        await zips.release(c.uuid)
        assert await play(gates, 1) == ["c"]
        assert a.is_new


async def test_a_command_that_does_not_fit_is_refused(url, gates):
    """With the state it found; for a task of another queue, for one that is unknown, and for what makes no sense."""
    async with build(url, gates.port, queues=ONE) as yard:
        zips = yard.queue("zip")
        running = await yard.submit("gate", {"name": "a"}, queue="zip")
        run = await gates.begun("a")
        other = await yard.submit("echo", delay_s=60)
        with pytest.raises(CommandRefused, match="it is running; a running task is never held"):
            await zips.hold(running.uuid)
        other_queue = "it is scheduled; it is in queue 'default', and this command is for 'zip'"
        with pytest.raises(CommandRefused, match=other_queue) as refused:
            await zips.hold(other.uuid)
        assert refused.value.code == "changed_meanwhile"
        with pytest.raises(UnknownTask):
            await zips.hold("nobody")
        for wrong in ({}, {"before": other.uuid, "after": other.uuid}):
            with pytest.raises(InvalidInput, match="before= or after="):
                await zips.move(other.uuid, **wrong)
        with pytest.raises(InvalidInput, match="datetime"):
            await yard.reschedule(other.uuid, 5)  # type: ignore[arg-type]
        run.finish()


async def test_a_task_is_brought_forward_and_put_off(url, gates):
    """What was scheduled for later runs when it is rescheduled to now, and the other way round."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "a"}, delay_s=3600)
        record = await yard.reschedule(handle.uuid, datetime.now(UTC) + timedelta(hours=2))
        assert record.state is S.SCHEDULED
        await yard.reschedule(handle.uuid, datetime.now(UTC))
        (await gates.begun("a")).finish()
        await handle.result(timeout_s=PATIENCE_S)


@pytest.mark.spec("QUE-15")
async def test_what_is_final_is_run_again_as_another_task(url):
    """A completed task, with its own arguments or others, becomes a new one that names the old."""
    async with build(url) as yard:
        old = await yard.submit("add", {"a": 1, "b": 2}, priority="high", key="k")
        assert await old.result(timeout_s=PATIENCE_S) == 3
        new = await yard.run_again(old.uuid, by="ann")
        other = await yard.run_again(old.uuid, {"a": 5})
        assert [await new.result(timeout_s=PATIENCE_S), await other.result(timeout_s=PATIENCE_S)] == [3, 6]
        record = await new.record()
        assert (record.origin, record.priority, record.key, record.submitted_by) == (old.uuid, 0, "k", "ann")
        assert (await old.record()).origin is None
        with pytest.raises(UnknownTask):
            await yard.run_again("nobody")
        pending = await yard.submit("echo", delay_s=60)
        with pytest.raises(CommandRefused, match="it has not finished yet") as refused:
            await yard.run_again(pending.uuid)
        assert refused.value.code == "not_finished"


@pytest.mark.spec("SCH-13")
async def test_all_that_match_are_sent_again(url, gates):
    """Failed ones are counted first, then sent again, those with this error only, the oldest first."""
    yard = build(url, gates.port, queues=ONE)
    async with yard:
        handles = [
            await yard.submit("gate", {"name": name}, queue="zip", retry=RetryPolicy(max_retries=0)) for name in "abcd"
        ]
        for name, error in zip("abcd", ["OSError", "ValueError", "OSError", "PermissionError"], strict=True):
            (await gates.begun(name)).fail(error)
        for handle in handles:
            with pytest.raises(Exception, match="as told"):
                await handle.result(timeout_s=PATIENCE_S)
        failed = yard.matching(TaskFilter(states=(S.FAILED,), error="OSError"), by="ann")
        report = await failed.retry(dry_run=True)
        assert (report.matched, report.moved, report.refused, await failed.count()) == (3, 0, 0, 3)
        await yard.queue("zip").pause()
        report = await failed.retry()
        assert (report.matched, report.moved, report.refused) == (3, 3, 0)
        await yard.queue("zip").resume()
        assert await play(gates, 3) == ["a", "c", "d"]
        assert await handles[1].state() is S.FAILED


async def test_all_that_match_in_many_chunks(url):
    """Thousands are canceled some hundreds at a time; those of other queues, and what was asked before, stay."""
    async with build(url) as yard:
        await yard.queue("zip").pause()
        handles = await yard.submit_many("echo", [{"value": n} for n in range(1203)], queue="zip")
        other = await yard.submit("echo", delay_s=60)
        await yard.skip(handles[7].uuid)
        waiting = yard.queue("zip").matching(TaskFilter(states=(S.QUEUED,)))
        assert await waiting.count() == 1202
        report = await waiting.cancel(reason="too many")
        assert (report.matched, report.moved, report.refused) == (1202, 1202, 0)
        with pytest.raises(TaskCanceled, match="too many"):
            await handles[600].result(timeout_s=PATIENCE_S)
        assert await other.state() is S.SCHEDULED
        assert (await yard.queue("zip").status()).counts == {S.CANCELED: 1202, S.SKIPPED: 1}


def sleep_on(path: str) -> None:
    """It says that it began, and would take ten minutes, whoever asks it to end."""
    Path(path).write_text("began")
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            time.sleep(600)
        except BaseException:
            continue


@pytest.mark.spec("QUE-12")
async def test_a_cancel_by_force_does_not_wait(file_url, tmp_path):
    """A task that heeds no request is killed at once, without the grace of seconds, and its record warns."""
    yard = Yard(file_url)
    sleeper = yard.consumer(executor=PROCESS)(sleep_on)
    async with yard:
        handle = await sleeper.submit(str(tmp_path / "began"))
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / "began").exists():
                await handle.record()  # a look takes a moment, and lets the loop go on
        began = time.monotonic()
        record = await yard.cancel(handle.uuid, force=True, by="ann")
        assert record.cancel is not None
        assert (record.cancel.actor, record.cancel.is_forced) == ("ann", True)
        assert "may be damaged" in record.remarks
        with pytest.raises(TaskCanceled):
            await handle.result(timeout_s=PATIENCE_S)
        assert time.monotonic() - began < 4.0  # the grace alone would be five seconds
