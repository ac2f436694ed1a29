"""New tasks made of ended ones: one, or all that match, with their arguments or with some changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from taskyard.errors import (
    AccountQuarantined,
    CommandRefused,
    InvalidInput,
    StoreError,
    TaskyardError,
    UnknownConsumer,
    UnknownTask,
    quote,
)
from taskyard.handle import TaskHandle
from taskyard.model.audit import AuditEntry, TargetKind, filter_document, make_entry
from taskyard.model.device import read_account
from taskyard.model.given import check_by
from taskyard.model.notes import Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import NO_EXTRA, Dedupe, DedupeScope, TaskExtra, TaskRecord, new_uuid
from taskyard.model.task_filter import TaskFilter
from taskyard.options import TaskOptions, check_size, make_record
from taskyard.ports.consumer import Consumer
from taskyard.ports.device import DeviceStore
from taskyard.ports.store import Add, Added
from taskyard.queueing.audit import finish_audit
from taskyard.queueing.matching import RerunReport, Tally, in_chunks, list_chunks, see_through
from taskyard.queueing.summary import RESULTS, is_summary, with_results

if TYPE_CHECKING:
    from taskyard.yard import Yard

BATCH = 100
"""Tasks that are submitted at once: each may have a megabyte of arguments."""

STANDS_S = 86_400.0
"""For how long a new task stands for its origin having been run again. Whoever looked before it was made, and comes to
that origin later, finds it: a day is longer than that takes, and than clocks differ."""

LOOK_UP = 5_000
"""Tasks that are asked for at once, whether others were made of them: the memory store goes through all it has."""

RUN_AGAIN = "run_again"
"""The command in the audit record."""

Arguments = Mapping[str, Any] | None


async def run_again(yard: Yard, uuid: str, args: Arguments, changes: Arguments, *, by: str) -> TaskHandle:
    check_by(by)
    if args is not None and changes is not None:
        raise InvalidInput("give args, all of them, or changes to those of the old task, not both")
    record = await _make(yard, uuid, args, changes)
    for quarantined in (await _find_quarantined(yard, [record])).values():
        raise quarantined
    _note_actor(record, by, yard._engine.clock.now())
    entry = make_entry(by, RUN_AGAIN, TargetKind.TASK, uuid, now=yard.now(), is_finished=False)
    await _begin(yard, entry)
    yard._note_unserved((record,))
    (added,) = await yard._engine.submit(Add((record,), parent=yard._find_parent()))
    await finish_audit(yard.store.put_audit, entry, matched=1, changed=1, details={"task": added.uuid})
    return TaskHandle(yard, added.uuid, added.is_new)


class _Tally(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.run_again = 0
        self.made: list[str] = []

    def count(self, added: Sequence[Added]) -> None:
        """What became of those that were asked for: somebody may have been first, since it was looked."""
        made = [one.uuid for one in added if one.is_new]
        self.made += made
        self.moved += len(made)
        self.matched -= len(added) - len(made)
        self.run_again += len(added) - len(made)

    def report(self) -> RerunReport:
        so_far = msgspec.structs.asdict(super().report())
        return RerunReport(**so_far, run_again=self.run_again, made=tuple(self.made))


async def run_all_again(
    yard: Yard,
    where: TaskFilter,
    changes: Arguments,
    *,
    repeat: bool,
    dry_run: bool,
    so_far: Callable[[RerunReport], None] | None,
    by: str,
) -> RerunReport:
    """The oldest first. Those in quarantine are left out unless the filter names them; those of which new ones were
    made before unless they are to be repeated: so the same call goes on where it was interrupted."""
    check_by(by)
    details = {"where": filter_document(where)} | ({"repeat": True} if repeat else {})
    entry = make_entry(
        by, RUN_AGAIN, TargetKind.TASKS, where.queue or "", now=yard.now(), details=details, is_finished=False
    )
    tally, meant = _Tally(), replace(where, states=tuple(s for s in where.states or TaskState if s in ENDED))
    for state in where.states or ():
        if state not in ENDED:
            for_state = [uuids async for uuids in list_chunks(yard._engine, replace(where, states=(state,)))]
            tally.set_aside("not_finished", sum(map(len, for_state)))
    if meant.quarantined is None:
        poisoned = list_chunks(yard._engine, replace(meant, quarantined=True))
        tally.quarantined = sum([len(uuids) async for uuids in poisoned])
        meant = replace(meant, quarantined=False)
    # All of them are known before the first is made: what is made may end soon, and match as well.
    found = [uuid async for uuids in list_chunks(yard._engine, meant) for uuid in uuids][::-1]
    if not repeat:
        over: set[str] = set()
        async for uuids in in_chunks(yard._engine, found, size=LOOK_UP):
            over |= await yard.store.list_origins(uuids)
        found, tally.run_again = [uuid for uuid in found if uuid not in over], len(over)
    tally.matched += len(found)
    entry = None if dry_run else entry
    await _begin(yard, entry, matched=tally.matched)
    async for uuids in in_chunks(yard._engine, [] if dry_run else found, size=BATCH):
        records = await _make_many(yard, uuids, changes, tally)
        for record in records:
            _note_actor(record, by, yard._engine.clock.now())
        try:
            if records:
                await see_through(_submit(yard, records, repeat=repeat), tally.count)
                counts = {"matched": tally.matched, "changed": tally.moved}
                await finish_audit(yard.store.put_audit, entry, **counts, is_finished=False)
        finally:
            if so_far is not None:
                so_far(tally.report())
    await finish_audit(yard.store.put_audit, entry, matched=tally.matched, changed=tally.moved)
    return tally.report()


async def _begin(yard: Yard, entry: AuditEntry | None, *, matched: int = 0) -> None:
    """Write the audit entry before the first task is submitted: a submit goes with others into one transaction, which
    has no room for it. If this fails, nothing was submitted."""
    if entry is not None:
        await yard.store.put_audit(replace(entry, matched=matched))


def _note_actor(record: TaskRecord, by: str, now: datetime) -> None:
    if by:
        record.note = Note(NoteCode.RUN_AGAIN, by, at=now)
        record.extra = msgspec.structs.replace(record.extra or NO_EXTRA, submitted_by=by)


async def _submit(yard: Yard, records: Sequence[TaskRecord], *, repeat: bool) -> list[Added]:
    """Race: others may be at the same tasks. Of all that are made of one origin the first is stored, and the others are
    merged into it, unless they are to be repeated."""
    parent = yard._find_parent()
    yard._note_unserved(records)
    if repeat:
        return await yard._engine.submit(Add(records, parent=parent), prompt=False)
    for record in records:
        # No slot of a submitted task begins so: theirs do with a number.
        record.dedupe_slot, record.dedupe_scope = f"again {record.origin}", DedupeScope.WINDOW
    return await yard._engine.submit(Add(records, Dedupe.MERGE, parent, window_s=STANDS_S), prompt=False)


async def _make_many(yard: Yard, uuids: Sequence[str], changes: Arguments, tally: Tally) -> list[TaskRecord]:
    records: list[TaskRecord] = []
    for uuid in uuids:
        try:
            records.append(await _make(yard, uuid, None, changes))
        except (CommandRefused, UnknownTask):
            tally.changed_meanwhile += 1
        except (StoreError, UnknownConsumer):
            raise
        except TaskyardError as refused:
            tally.set_unfit(refused.code, str(refused))
    for quarantined in (out := await _find_quarantined(yard, records)).values():
        tally.set_unfit(quarantined.code, str(quarantined))
    return [record for record in records if record.uuid not in out]


async def _find_quarantined(yard: Yard, records: Sequence[TaskRecord]) -> dict[str, AccountQuarantined]:
    """By uuid, those whose account is quarantined with their consumer. A task that is run again is a duplicate of
    nothing, so the store does not look for that."""
    store = yard.store
    if all(record.key is None for record in records) or not isinstance(store, DeviceStore):
        return {}
    out = {(one.pool, one.account, one.consumer) for one in await store.list_quarantined_accounts()}
    return {
        record.uuid: AccountQuarantined(read_account(record.key), record.consumer, record.queue)
        for record in records
        if record.key is not None and (record.queue, record.key, record.consumer) in out
    }


async def _make(yard: Yard, uuid: str, args: Arguments, changes: Arguments) -> TaskRecord:
    old = await yard.store.find(uuid)
    if old is None:
        raise UnknownTask(uuid)
    if old.state not in ENDED:
        raise CommandRefused(old.uuid, "run again", old.state, code="not_finished")
    if is_summary(old):
        old = await with_results(yard.store, old)  # it is nobody's summary any more, and gets what it got
    if args is not None:
        record = _submitted(yard, old, yard._get_consumer(old.consumer), args)
    else:
        now = yard._engine.clock.now()
        record = TaskRecord(new_uuid(), old.consumer, now, now, now, 0, old.queue, old.args, priority=old.priority)
        record.key, record.bucket, record.timeout_s, record.retry = old.key, old.bucket, old.timeout_s, old.retry
        record.requires = old.requires
        if old.title or old.labels or old.values:
            record.extra = TaskExtra(title=old.title, labels=old.labels, values=old.values)
        if changes is not None:
            # What `produce` made of the arguments once is what is kept, and changed here.
            kept: dict[str, Any] = msgspec.json.decode(old.args)
            record.args = yard._get_consumer(old.consumer).encode(kept | _named(changes))
        # The old arguments need no consumer to check them: this process may be one that only steers.
        check_size(old.consumer, record.args, yard._max_payload_bytes)
    record.origin = old.uuid
    return record


def _submitted(yard: Yard, old: TaskRecord, consumer: Consumer, args: Mapping[str, Any]) -> TaskRecord:
    """As if it were submitted with these arguments."""
    given = _named(args)
    if consumer.takes_results and old.group_id == old.uuid:
        given[RESULTS] = msgspec.json.decode(old.args)[RESULTS]
    limits = [limit for limit in (old.timeout_s, consumer.timeout_s) if limit is not None]
    options = TaskOptions(
        priority=Priority(old.priority),
        queue=old.queue,
        key=None if consumer.account else old.key,
        bucket=old.bucket,
        title=old.title,
        labels=old.labels,
        requires=old.requirements,
        timeout_s=None if old.timeout_s is None else min(limits),
        retry=old.retry,
    )
    now, limit = yard._engine.clock.now(), yard._max_payload_bytes
    record = make_record(consumer, given, options, now=now, max_bytes=limit)
    record.dedupe_slot = record.dedupe_scope = None
    return record


def _named(args: Any) -> dict[str, Any]:
    if not isinstance(args, Mapping):
        raise InvalidInput(f"arguments must be a dict of names and values, not {quote(args)}")
    return dict(args)
