"""Tasks that are submitted together, looked at together, and may end in one that gets what all of them returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from taskyard.errors import BatchTooLarge, InvalidInput, TaskyardError, UnknownGroup, quote
from taskyard.handle import BoundTask, TaskHandle
from taskyard.model.audit import AuditEntry, bulk_entry
from taskyard.model.command import Cancel, Command
from taskyard.model.given import check_by, check_reason
from taskyard.model.kinds import checked_verbs
from taskyard.model.state import COMPLETED, ENDED, TaskState
from taskyard.model.task import Dedupe, new_uuid
from taskyard.model.task_filter import TaskFilter
from taskyard.options import MAX_BATCH
from taskyard.ports.paging import id_pages
from taskyard.ports.store import Add
from taskyard.queueing.audit import finish_audit
from taskyard.queueing.summary import RESULTS, expect_results

if TYPE_CHECKING:
    from taskyard.yard import Yard


class GroupProgress(msgspec.Struct, frozen=True):
    """How many tasks of a group are in which state, its summary aside."""

    states: dict[TaskState, int]

    @property
    def total(self) -> int:
        return sum(self.states.values())

    @property
    def completed(self) -> int:
        return self.states.get(COMPLETED, 0)

    @property
    def ended(self) -> int:
        """Those that are over, however they ended."""
        return sum(n for state, n in self.states.items() if state in ENDED)

    @property
    def fraction(self) -> float:
        return self.ended / self.total


@checked_verbs
class Group:
    """A group of a yard, known by its `id`, which is also the uuid of its summary. `tasks` are the handles that
    `submit_group` returned, in order; a group that was made of its id alone has none."""

    def __init__(self, yard: Yard, uuid: str, tasks: Sequence[TaskHandle] = (), *, has_summary: bool = True) -> None:
        self._yard, self.id, self.tasks = yard, uuid, tuple(tasks)
        self._has_summary = has_summary

    def __repr__(self) -> str:
        return f"Group({self.id!r})"

    @property
    def summary(self) -> TaskHandle:
        if not self._has_summary:
            raise InvalidInput("this group was submitted without a summary; wait for its tasks")
        return TaskHandle(self._yard, self.id)

    async def progress(self) -> GroupProgress:
        """How far it is; `UnknownGroup` if the store has no task of it."""
        states = await self._yard.store.count_group(self.id)
        if not states:
            raise UnknownGroup(self.id)
        return GroupProgress(states)

    async def cancel(self, *, reason: str = "", by: str = "") -> int:
        """Cancel all that have not ended; those that run are asked to stop. How many that were. `by` is who asks."""
        command, by = Cancel(check_reason(reason)), check_by(by)
        audit = bulk_entry(by, command, TaskFilter(group=self.id), now=self._yard.now())
        # Who waits for others goes first: it would end with them, and say so instead.
        count = matched = 0
        for states in ((TaskState.BLOCKED,), tuple(state for state in TaskState if state not in ENDED)):
            uuids = await self._list(states)
            sent, _ = await self._apply(uuids, command, by, audit)
            count, matched = count + sent, matched + len(uuids)
        await finish_audit(self._yard._engine.put_audit, audit, matched=matched, changed=count)
        return count

    async def retry(self, *, include_quarantined: bool = False, by: str = "") -> int:
        """Send those that failed again, and the summary if it failed with them; how many that were. What was canceled
        or skipped is final; what took its workers down stays, unless `include_quarantined`. If none can be sent, why
        the first cannot is raised."""
        failed = self._yard.matching(TaskFilter(group=self.id, states=(TaskState.FAILED,)), by=by)
        report = await failed.retry(to_head=False, include_quarantined=include_quarantined)
        if not report.moved and failed.first_refused is not None:
            raise failed.first_refused
        return report.moved

    async def _list(self, states: tuple[TaskState, ...]) -> list[str]:
        """The tasks in these states, oldest first."""
        pages = id_pages(self._yard.store.list_ids, TaskFilter(group=self.id, states=states))
        return [uuid async for page in pages for _, uuid in page][::-1]

    async def _apply(
        self, uuids: Sequence[str], command: Command, by: str, audit: AuditEntry | None
    ) -> tuple[int, dict[str, TaskyardError]]:
        applied = await self._yard._engine.apply(uuids, command, by=by, audit=audit) if uuids else []
        refused = {one.uuid: one.refused for one in applied if one.refused is not None}
        return len(applied) - len(refused), refused


async def submit_group(yard: Yard, tasks: Iterable[BoundTask], summary: BoundTask | None) -> Group:
    members = _members(tasks, summary)
    group = new_uuid() if summary is None else summary.uuid
    records = [yard._make_bound(bound, bound.args) for bound in members]
    after = {bound.uuid: bound.options.after for bound in members if bound.options.after}
    if summary is not None:
        waits = tuple(dict.fromkeys([*(bound.uuid for bound in members), *(summary.options.after or ())]))
        last = yard._make_bound(_after(summary, waits), _summary_args(summary))
        expect_results(last, len(members))
        after[summary.uuid] = waits
        records.append(last)
    for record in records:
        record.group_id = group
    yard._note_unserved(records)
    await yard._engine.submit(Add(records, parent=yard._find_parent(records), after=after), prompt=False)
    handles = [TaskHandle(yard, bound.uuid) for bound in members]
    return Group(yard, group, handles, has_summary=summary is not None)


def _after(bound: BoundTask, others: tuple[str, ...]) -> BoundTask:
    return replace(bound, options=replace(bound.options, after=others))


def _members(tasks: Iterable[BoundTask], summary: BoundTask | None) -> list[BoundTask]:
    members: list[BoundTask] = []
    for bound in tasks:
        members.append(_check(bound))
        if len(members) >= MAX_BATCH:
            raise BatchTooLarge(MAX_BATCH)
    if not members:
        raise InvalidInput("a group needs at least one task")
    everyone = members if summary is None else [*members, _check(summary)]
    if len({bound.uuid for bound in everyone}) < len(everyone):
        raise InvalidInput("the same bound task is in the group twice; bind it once for each time it is to run")
    return members


def _check(bound: Any) -> BoundTask:
    if not isinstance(bound, BoundTask):
        raise InvalidInput(
            f"a group is made of bound tasks, as fetch.bind(…) or yard.bind('fetch', …), not {quote(bound)}"
        )
    if bound.options.dedupe is not Dedupe.ALLOW:
        raise InvalidInput(
            "a task of a group cannot be merged into another, refused for it or replace it; leave dedupe out"
        )
    refuse_connection(bound.options.connection)
    return bound


def refuse_connection(connection: object) -> None:
    if connection is not None:
        raise InvalidInput(
            "a group does not go into a transaction of your own; leave connection out, or submit it when you have "
            "committed"
        )


def _summary_args(summary: BoundTask) -> dict[str, Any]:
    """With a place for what the others return, where the consumer takes that: it is filled when the summary starts."""
    if not summary.consumer.takes_results:
        return summary.args
    if RESULTS in summary.args:
        raise InvalidInput(f"the argument {RESULTS!r} of a summary is what the others return; leave it out")
    return {**summary.args, RESULTS: []}
