"""Commands on tasks: submitting them, commands on some by ref and on all that match a filter, groups."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any

import msgspec

from taskyard.application.bulk import follow_matching, follow_rerun
from taskyard.application.calls import YardContext, check_filter_names, check_limit
from taskyard.application.command_requests import (
    Cancel,
    MoveAfter,
    MoveBefore,
    SetPriority,
    StartNow,
    TaskCommand,
    task_command,
)
from taskyard.application.errors import AmbiguousTask, InvalidRef, describe_error
from taskyard.application.groups import find_group, list_members
from taskyard.application.queue_order import find_places
from taskyard.application.refs import resolve_task, resolve_tasks
from taskyard.application.submitting import find_consumer, find_other_queues, fit_arguments
from taskyard.application.task_documents import task_document, task_fields, why_document
from taskyard.application.task_requests import (
    BulkReport,
    CommandReceipt,
    GroupDocument,
    GroupReceipt,
    PruneReport,
    RerunReport,
    SubmitReceipt,
    SubmitRequest,
)
from taskyard.errors import CommandRefused, DuplicateTask, InvalidArguments, StoreError, TaskyardError, UnknownTask
from taskyard.handle import TaskHandle
from taskyard.model.redaction import Redactor
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason
from taskyard.queueing.controller import ask_one

MOVES = (StartNow, MoveBefore, MoveAfter, SetPriority)
"""Commands after which a task stands elsewhere."""


class LocalTaskCommands:
    """The commands of `TaskCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    # --- new tasks ----------------------------------------------------------------------------------------------------

    async def submit(self, request: SubmitRequest) -> SubmitReceipt:
        yard = self._context.yard
        options = request.options(submitted_by=self._context.actor)
        consumer, is_checked = await find_consumer(yard, request.consumer)
        args = fit_arguments(consumer, request) if is_checked else request.args
        if request.after:
            options = msgspec.structs.replace(options, after=tuple(await resolve_tasks(yard, request.after)))
        known_queues = None if request.queue is None else await find_other_queues(yard, request.queue)
        handle = await yard._submit_to(consumer, args, options)
        record = await _find_submitted(handle)
        yard._unserved.forget(request.consumer)  # the receipt says it
        return SubmitReceipt(
            **task_fields(record, Redactor(record)),
            is_new=handle.is_new,
            window_ends_at=handle.until,
            is_served=(await yard.catalogue()).is_served(request.consumer),
            is_checked=is_checked,
            known_queues=known_queues,
        )

    async def rerun(
        self,
        refs: Sequence[str],
        *,
        changes: Mapping[str, Any] | None = None,
        changes_text: Mapping[str, str] | None = None,
    ) -> tuple[CommandReceipt, ...]:
        receipts = []
        for ref in dict.fromkeys(refs):
            try:
                record = await self._rerun_one(ref, changes or None, changes_text or {})
                receipts.append(CommandReceipt(ref=ref, ok=True, task=task_document(record)))
            except StoreError:
                raise
            except TaskyardError as refused:
                receipts.append(CommandReceipt(ref=ref, ok=False, error=describe_error(refused)))
        return tuple(receipts)

    async def _rerun_one(self, ref: str, changes: Mapping[str, Any] | None, texts: Mapping[str, str]) -> TaskRecord:
        yard, actor = self._context.yard, self._context.actor
        uuid = await resolve_task(yard, ref)
        try:
            handle = await yard.run_again(uuid, changes=changes, by=actor)
        except InvalidArguments as refused:  # the consumer may take the text that was typed instead of its value
            typed = {name: text for name, text in texts.items() if name in refused.names}
            if changes is None or not typed:
                raise
            try:
                handle = await yard.run_again(uuid, changes={**changes, **typed}, by=actor)
            except InvalidArguments:
                raise refused from None  # it is about the value that was meant, not about its text
        return await handle.record()

    async def rerun_matching(
        self,
        where: TaskFilter,
        *,
        changes: Mapping[str, Any] | None = None,
        repeat: bool = False,
        dry_run: bool = False,
    ) -> AsyncGenerator[RerunReport, None]:
        await check_filter_names(self._context, where)
        following = follow_rerun(self._context, where, changes or None, repeat=repeat, dry_run=dry_run)
        async with aclosing(following) as reports:
            async for report in reports:
                yield report

    # --- commands -----------------------------------------------------------------------------------------------------

    async def apply(self, refs: Sequence[str], command: TaskCommand) -> tuple[CommandReceipt, ...]:
        named = list(dict.fromkeys(refs))
        if isinstance(command, MoveBefore | MoveAfter):
            other = await resolve_task(self._context.yard, command.other)
            command = msgspec.structs.replace(command, other=other)
        # Each goes right after the other task, and so before those that went there earlier: the last goes first.
        turns = named[::-1] if isinstance(command, MoveAfter) else named
        receipts = {ref: await self._apply_one(ref, command) for ref in turns}
        if isinstance(command, MOVES):
            await self._add_places(receipts)
        return tuple(receipts[ref] for ref in named)

    async def _add_places(self, receipts: dict[str, CommandReceipt]) -> None:
        """Where the tasks stand now, when all of them have been moved."""
        moved = {ref: receipt.task for ref, receipt in receipts.items() if receipt.task is not None}
        places = await find_places(self._context.yard, list(moved.values()))
        for ref, task in moved.items():
            receipts[ref] = msgspec.structs.replace(receipts[ref], place=places.get(task.uuid))

    async def _apply_one(self, ref: str, command: TaskCommand) -> CommandReceipt:
        """A task that is refused does not keep the others from being asked; a store that fails does."""
        yard = self._context.yard
        try:
            uuid = await resolve_task(yard, ref)
            record = await ask_one(yard._engine, uuid, task_command(command), by=self._context.actor)
        except (CommandRefused, UnknownTask, AmbiguousTask, InvalidRef) as refused:
            return CommandReceipt(ref=ref, ok=False, error=describe_error(refused))
        why = None
        if isinstance(command, Cancel) and record.state is TaskState.RUNNING:
            why = await yard.why(record.uuid)
            why = why if why is not None and why.reason is Reason.NODE_SILENT else None
        redactor = Redactor(record)
        return CommandReceipt(ref=ref, ok=True, task=task_document(record), why=why_document(why, redactor))

    async def apply_matching(
        self, where: TaskFilter, command: TaskCommand, *, dry_run: bool = False
    ) -> AsyncGenerator[BulkReport, None]:
        await check_filter_names(self._context, where)
        following = follow_matching(self._context, where, task_command(command), dry_run=dry_run)
        async with aclosing(following) as reports:
            async for report in reports:
                yield report

    async def prune(self, *, finished_before: datetime, dry_run: bool = False) -> PruneReport:
        yard = self._context.yard
        matched = pruned = 0
        if dry_run:
            finished = tuple(state for state in TaskState if state in ENDED)
            matched = await yard.matching(TaskFilter(states=finished, finished_before=finished_before)).count()
        else:
            matched = pruned = await yard.prune(finished_before, by=self._context.actor)
        return PruneReport(matched=matched, pruned=pruned, before=finished_before, dry_run=dry_run)

    # --- groups -------------------------------------------------------------------------------------------------------

    async def get_group(self, ref: str, *, limit: int = 20) -> GroupDocument:
        check_limit(limit)
        yard = self._context.yard
        group = await find_group(yard, ref)
        progress = await group.progress()
        summary = await yard.store.find(group.id)
        return GroupDocument(
            group=group.id,
            total=progress.total,
            finished=progress.ended,
            completed=progress.completed,
            states=progress.states,
            summary=None if summary is None else task_document(summary),
            tasks=tuple([task_document(record) for record in await list_members(yard, group.id, limit)]),
        )

    async def cancel_group(self, ref: str, *, reason: str = "") -> GroupReceipt:
        group = await find_group(self._context.yard, ref)
        changed = await group.cancel(reason=reason, by=self._context.actor)
        return GroupReceipt(group=group.id, changed=changed, states=(await group.progress()).states)

    async def retry_group(self, ref: str, *, include_quarantined: bool = False) -> GroupReceipt:
        group = await find_group(self._context.yard, ref)
        changed = await group.retry(include_quarantined=include_quarantined, by=self._context.actor)
        return GroupReceipt(group=group.id, changed=changed, states=(await group.progress()).states)


async def _find_submitted(handle: TaskHandle) -> TaskRecord:
    try:
        return await handle.record()
    except UnknownTask:
        if handle.until is None:
            raise
        raise DuplicateTask(handle.uuid, "", "forgotten", until=handle.until) from None
