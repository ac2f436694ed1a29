"""What people asked for is recorded, once per call, also if a command is interrupted."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from taskyard import TaskFilter, Yard
from taskyard.errors import OutcomeUnknown, StoreUnavailable, UnknownSchedule
from taskyard.model.audit import AuditEntry
from taskyard.ports.clock import SystemClock
from taskyard.queueing import matching
from taskyard.retention import KEEP_AUDIT_S, Keep, Retention
from taskyard.stores.memory import MemoryStore
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build


async def short(yard: Yard) -> list[tuple[str, str, str, int, int]]:
    """The entries, oldest first."""
    return [(e.actor, e.via, e.command, e.matched, e.changed) for e in reversed(await yard.audit())]


async def test_commands_with_an_actor_are_recorded(url):
    """Commands on tasks and queues leave one entry each, with who asked and how; those without an actor leave none."""
    async with build(url).client() as yard:
        one, other = [await yard.submit("echo") for _ in range(2)]
        await yard.hold(one.uuid, reason="later", by="cli:ana")
        await yard.release(one.uuid)
        await yard.queue("default").pause()
        await yard.queue("default", by="bob").set_concurrency(3, reason="slow disk")
        await yard.queue("default", by="http:eve").cancel(other.uuid)
        assert await short(yard) == [
            ("ana", "cli", "hold", 1, 1),
            ("bob", "python", "set_concurrency", 1, 1),
            ("eve", "http", "cancel", 1, 1),
        ]
        (entry,) = await yard.audit(queue="default")
        assert (entry.reason, entry.details) == ("slow disk", {"concurrency": 3})
        assert [e.command for e in await yard.audit(task=one)] == ["hold"]
        assert [e.command for e in await yard.audit(by="eve")] == ["cancel"]


async def test_a_bulk_command_is_one_entry(url, monkeypatch):
    """However many tasks a filter matches, and however many transactions that takes, the call is one entry with the
    filter and the counts; a dry run is none."""
    monkeypatch.setattr(matching, "CHUNK", 10)
    async with build(url).client() as yard:
        await yard.submit_many("echo", [{}] * 25)
        await yard.submit_many("add", [{"a": 1}] * 3)
        await yard.matching(TaskFilter(consumer="echo"), by="cli:ana").cancel(reason="test", dry_run=True)
        await yard.matching(TaskFilter(consumer="echo"), by="cli:ana").cancel(reason="test")
        await yard.matching(TaskFilter(consumer="nothing"), by="cli:ana").cancel()
        nothing, entry = await yard.audit()
        assert (entry.command, entry.matched, entry.changed, entry.is_finished) == ("cancel", 25, 25, True)
        assert (entry.target, entry.reason, entry.details) == ("", "test", {"where": {"consumer": "echo"}})
        assert (nothing.matched, nothing.changed, nothing.is_finished) == (0, 0, True)


async def test_an_interrupted_bulk_command_is_recorded(url, monkeypatch):
    """A command that is cut off after some chunks leaves an entry with what it had changed until then, which is not
    finished."""
    monkeypatch.setattr(matching, "CHUNK", 10)
    monkeypatch.setattr(matching, "PATIENCE", 1e6)
    async with build(url).client() as yard:
        await yard.submit_many("echo", [{}] * 25)
        command = asyncio.create_task(yard.matching(TaskFilter(consumer="echo"), by="ana").cancel())
        async with asyncio.timeout(PATIENCE_S):
            while not (entries := await yard.audit()):  # noqa: ASYNC110 - it waits for its next chunk for ever
                await asyncio.sleep(0)
        command.cancel()
        await asyncio.wait([command])
        (entry,) = entries
        assert (entry.matched, entry.changed, entry.is_finished) == (10, 10, False)
        assert await yard.audit() == entries


async def test_groups_reruns_nodes_and_prunes_are_recorded(url):
    """What is asked of a group, running tasks again, draining a node and forgetting tasks are one entry each."""
    async with build(url) as yard:
        group = await yard.submit_group([yard.bind("echo") for _ in range(3)])
        for handle in group.tasks:
            await handle.result(timeout_s=PATIENCE_S)
        assert await group.cancel(by="cli:ana") == 0
        again = await yard.run_again(group.tasks[0], by="cli:ana")
        await again.result(timeout_s=PATIENCE_S)
        report = await yard.run_all_again(TaskFilter(group=group.id), by="cli:ana")
        for uuid in report.made:
            await yard.handle(uuid).result(timeout_s=PATIENCE_S)
        (node,) = await yard.store.nodes()
        await yard.drain(node.node.incarnation, by="cli:ana")
        await yard.drain(node.node.incarnation, on=False)
        assert await yard.prune(datetime.now(UTC) + timedelta(days=1), by="cli:ana") == 6
        assert await short(yard) == [
            ("ana", "cli", "cancel", 0, 0),
            ("ana", "cli", "run_again", 1, 1),
            ("ana", "cli", "run_again", 2, 2),
            ("ana", "cli", "drain", 1, 1),
            ("ana", "cli", "prune", 6, 6),
        ]
        entries: list[AuditEntry] = await yard.audit()
        assert all(entry.is_finished for entry in entries)
        assert entries[3].details == {"task": again.uuid}


async def test_changes_of_schedules_are_recorded(url):
    """Adding, pausing, resuming, running and removing a schedule leave an entry each when somebody is named."""
    async with build(url) as yard:
        schedules = yard.schedules
        await schedules.add("nightly", "0 4 * * *", "echo", by="cli:ana")
        await schedules.pause("nightly", note="holidays", by="cli:ana")
        await schedules.resume("nightly", by="cli:ana")
        await (await schedules.run_now("nightly", by="cli:ana")).result(timeout_s=PATIENCE_S)
        await schedules.run_now("nightly")
        start = datetime(2030, 1, 1, tzinfo=UTC) - timedelta(days=3650)
        made = await schedules.backfill("nightly", start, start + timedelta(days=2), by="cli:ana", again=True)
        await schedules.remove("nightly", by="cli:ana")
        with pytest.raises(UnknownSchedule):
            await schedules.remove("nightly", by="cli:ana")
        assert await short(yard) == [
            ("ana", "cli", "put_schedule", 1, 1),
            ("ana", "cli", "pause_schedule", 1, 1),
            ("ana", "cli", "resume_schedule", 1, 1),
            ("ana", "cli", "run_schedule", 1, 1),
            ("ana", "cli", "backfill_schedule", len(made), len(made)),
            ("ana", "cli", "remove_schedule", 1, 1),
        ]
        assert {entry.target for entry in await yard.audit()} == {"nightly"}


async def test_the_record_has_its_own_retention(url):
    """The record outlives the tasks: it is kept for `keep_audit_s` seconds, a year unless told otherwise."""
    assert KEEP_AUDIT_S == 365 * 86_400
    async with build(url).client() as yard:
        handle = await yard.submit("echo")
        await yard.cancel(handle.uuid, by="ana")
        clock = yard._engine.clock
        await Retention(yard.store, clock, Keep(0.0), keep_audit_s=3600.0).step()
        assert await yard.store.find(handle.uuid) is None
        assert len(await yard.audit()) == 1
        await Retention(yard.store, clock, Keep(None), keep_audit_s=None).step()
        assert len(await yard.audit()) == 1
        await Retention(yard.store, clock, Keep(None), keep_audit_s=0.0).step()
        assert await yard.audit() == []


class NoLastWrite(MemoryStore):
    """Cannot finish an audit entry."""

    async def put_audit(self, entry: AuditEntry) -> None:
        if entry.is_finished:
            raise OutcomeUnknown("the connection was lost")
        await super().put_audit(entry)


async def test_a_command_that_is_done_does_not_fail_for_its_audit_entry(caplog):
    """If the last write of the entry fails after the tasks were changed, the call succeeds and a line is logged: a
    caller that gets an error would ask again, and the task would run twice."""
    async with build(NoLastWrite(SystemClock())) as yard:
        group = await yard.submit_group([yard.bind("echo")])
        await group.tasks[0].result(timeout_s=PATIENCE_S)
        again = await yard.run_again(group.tasks[0], by="ana")
        await again.result(timeout_s=PATIENCE_S)
        report = await yard.run_all_again(TaskFilter(group=group.id), repeat=True, by="ana")
        assert report.moved == 1
        await yard.handle(report.made[0]).result(timeout_s=PATIENCE_S)
        assert await group.cancel(by="ana") == 0
        assert (await yard.matching(TaskFilter(consumer="echo"), by="ana").cancel()).moved == 0
        assert await yard.prune(datetime.now(UTC) + timedelta(days=1), by="ana") == 3
        assert not any(entry.is_finished for entry in await yard.audit())
    assert caplog.text.count("was not updated: the store did not confirm it") == 5


async def test_nothing_is_submitted_without_the_first_audit_entry():
    """If the entry cannot be written before the submit, the call raises and no task was made."""

    class NoWrite(MemoryStore):
        async def put_audit(self, entry: AuditEntry) -> None:
            raise StoreUnavailable("away")

    async with build(NoWrite(SystemClock())) as yard:
        handle = await yard.submit("echo")
        await handle.result(timeout_s=PATIENCE_S)
        with pytest.raises(StoreUnavailable):
            await yard.run_again(handle, by="ana")
        assert len(await yard.store.list_tasks()) == 1
