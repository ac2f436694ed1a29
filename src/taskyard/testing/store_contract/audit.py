"""The audit record: one entry per call of a person, written with what the call changes."""

from __future__ import annotations

import msgspec
import pytest

from taskyard.errors import UnknownNode
from taskyard.model.audit import AuditEntry, AuditFilter, TargetKind, bulk_entry, command_entry, make_entry
from taskyard.model.command import Cancel, Hold, Release, SetPriority
from taskyard.model.order import Priority
from taskyard.model.queue import Pause, Resume
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, tick


def counts(entries: list[AuditEntry]) -> list[tuple[str, int, int, bool]]:
    return [(entry.command, entry.matched, entry.changed, entry.is_finished) for entry in entries]


class AuditContract(Desk):
    async def test_a_command_on_a_task_leaves_one_entry(self, store: Store, clock: ManualClock) -> None:
        """The entry has who asked, how, when, what, of which task and why; it comes back as it was written."""
        record = a_record()
        await add(store, record)
        command = Hold('Grüße, it\'s \\ "late"')
        entry = command_entry("cli:ana", command, TargetKind.TASK, record.uuid, now=tick(clock, 1.5))
        assert entry is not None
        await store.apply([record.uuid], command, by="cli:ana", audit=entry)
        (found,) = await store.list_audit()
        assert found == msgspec.structs.replace(entry, id=found.id, matched=1, changed=1)
        assert (found.actor, found.via, found.command, found.kind) == ("ana", "cli", "hold", TargetKind.TASK)
        assert (found.target, found.reason, found.at) == (record.uuid, command.reason, clock.now())

    async def test_what_changed_nothing_leaves_no_entry(self, store: Store, clock: ManualClock) -> None:
        """A command that is refused, or that changes nothing, leaves no entry; nor does one without an entry."""
        record, now = a_record(), clock.now()
        await add(store, record)
        release = command_entry("ana", Release(), TargetKind.TASK, record.uuid, now=now)
        (applied,) = await store.apply([record.uuid], Release(), by="ana", audit=release)
        assert applied.refused is not None
        await store.apply([record.uuid], Hold(), by="ana")
        await store.control(
            "q", Resume(), by="ana", audit=command_entry("ana", Resume(), TargetKind.QUEUE, "q", now=now)
        )
        with pytest.raises(UnknownNode):
            await store.drain("nobody", audit=make_entry("ana", "drain", TargetKind.NODE, "nobody", now=now))
        assert await store.list_audit() == []

    async def test_queues_and_nodes_are_recorded(self, store: Store, clock: ManualClock) -> None:
        """What is asked of a queue or a node is recorded when it changes something, and not when it is said again."""
        for _ in range(2):
            entry = command_entry("http:bob", Pause("backup"), TargetKind.QUEUE, "cpu", now=clock.now())
            await store.control("cpu", Pause("backup"), by="http:bob", audit=entry)
        await store.drain(A, audit=make_entry("bob", "drain", TargetKind.NODE, A, now=clock.now()))
        drained, paused = await store.list_audit()
        assert (drained.command, drained.kind, drained.target) == ("drain", TargetKind.NODE, A)
        assert (paused.command, paused.target, paused.reason, paused.via) == ("pause", "cpu", "backup", "http")

    async def test_a_command_for_many_is_one_entry(self, store: Store, clock: ManualClock) -> None:
        """The chunks of one call add to the counts of one entry; the filter is in it, and the end replaces the counts.
        A chunk of which nothing was changed counts as well."""
        records = [a_record() for _ in range(7)]
        await add(store, *records)
        where = TaskFilter(queue="default", labels={"customer": "4\u2028'2"})
        entry = bulk_entry("ana", SetPriority(Priority.HIGH), where, now=clock.now())
        assert entry is not None
        for chunk in (records[:3], records[3:6]):
            await store.apply([one.uuid for one in chunk], SetPriority(Priority.HIGH), by="ana", audit=entry)
        assert counts(await store.list_audit()) == [("set_priority", 6, 6, False)]
        await store.apply([records[6].uuid, "unknown"], SetPriority(Priority.LOW), by="ana", audit=entry)
        assert counts(await store.list_audit()) == [("set_priority", 8, 7, False)]
        await store.apply(["unknown"], SetPriority(Priority.LOW), by="ana", audit=entry)
        (found,) = await store.list_audit()
        assert (found.matched, found.changed) == (9, 7)
        assert found.details == {"priority": 0, "where": {"queue": "default", "labels": {"customer": "4\u2028'2"}}}
        await store.put_audit(msgspec.structs.replace(entry, matched=8, changed=7, is_finished=True))
        assert counts(await store.list_audit()) == [("set_priority", 8, 7, True)]
        assert (await store.list_audit())[0].id == found.id

    async def test_forgetting_tasks_is_recorded(self, store: Store, clock: ManualClock) -> None:
        """A prune that somebody asked for adds what it forgot to its entry."""
        records = [a_record() for _ in range(5)]
        await add(store, *records)
        await store.apply([one.uuid for one in records], Cancel())
        tick(clock, 10)
        entry = make_entry("ana", "prune", TargetKind.TASKS, now=clock.now(), is_finished=False)
        before = clock.now() - seconds(5)
        pruned = [await store.prune(finished_before=before, limit=2, audit=entry) for _ in range(3)]
        assert sum(pruned) == (await store.list_audit())[0].changed

    async def test_entries_are_listed_page_by_page(self, store: Store, clock: ManualClock) -> None:
        """The newest come first; a page goes on before the last entry seen; a filter asks for an actor with or without
        the way, a command, a target or a time."""
        asked = [
            ("cli:ana", "pause", TargetKind.QUEUE, "a"),
            ("ana", "pause", TargetKind.QUEUE, "b"),
            ("cli:bob", "drain", TargetKind.NODE, "a"),
            ("http:ana", "cancel", TargetKind.TASK, "a"),
        ]
        for by, command, kind, target in asked:
            entry = make_entry(by, command, kind, target, now=tick(clock, 1))
            assert entry is not None
            await store.put_audit(entry)
        everything = await store.list_audit()
        assert [entry.command for entry in everything] == ["cancel", "drain", "pause", "pause"]
        first = await store.list_audit(limit=2)
        rest = await store.list_audit(before_id=first[-1].id, limit=10)
        assert [*first, *rest] == everything

        async def found(**where: object) -> list[str]:
            listed = await store.list_audit(msgspec.convert(where, AuditFilter))
            assert listed == [entry for entry in everything if msgspec.convert(where, AuditFilter).matches(entry)]
            return [f"{entry.via} {entry.command}" for entry in listed]

        assert await found(actor="ana") == ["http cancel", "python pause", "cli pause"]
        assert await found(actor="cli:ana") == ["cli pause"]
        assert await found(commands=["pause"], since=everything[2].at) == ["python pause"]
        assert await found(kinds=["queue"], target="a") == ["cli pause"]
        assert await found(kinds=["node"], target="a") == ["cli drain"]
        assert await found(kinds=["queue", "node"], target="a") == ["cli drain", "cli pause"]
        assert await found(actor="nobody") == []

    async def test_old_entries_are_forgotten(self, store: Store, clock: ManualClock) -> None:
        """Entries are forgotten by the time of their call, oldest first, so many at a time; tasks stay."""
        record = a_record()
        await add(store, record)
        for n in range(5):
            entry = make_entry("ana", f"command_{n}", TargetKind.TASK, record.uuid, now=tick(clock, 1))
            assert entry is not None
            await store.put_audit(entry)
        before = clock.now() - seconds(0.5)
        assert [await store.prune_audit(before, limit=3) for _ in range(3)] == [3, 1, 0]
        assert [entry.command for entry in await store.list_audit()] == ["command_4"]
        assert await store.find(record.uuid) is not None
