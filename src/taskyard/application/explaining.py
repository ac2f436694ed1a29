"""Why many tasks wait, and what to type to free them."""

from __future__ import annotations

import shlex

from taskyard.application import queue_order_documents as documents
from taskyard.application.calls import YardContext, explain_no_match
from taskyard.model.redaction import Redactor
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason
from taskyard.model.why_groups import WaitGroup


async def explain_all(context: YardContext, where: TaskFilter, *, limit: int) -> documents.WaitSummary:
    summary = await context.yard.why_all(where)
    groups = [await _group(context, group) for group in summary.groups[:limit]]
    return documents.WaitSummary(
        total=summary.total,
        explained=summary.explained,
        is_sampled=summary.is_sampled,
        groups=tuple(groups),
        more_groups=max(0, len(summary.groups) - limit),
        no_match="" if groups else await explain_no_match(context, where),
    )


async def _group(context: YardContext, group: WaitGroup) -> documents.WaitGroup:
    record = await context.yard.store.find(group.uuid)
    return documents.WaitGroup(
        reason=group.reason,
        subject=group.subject,
        queue=group.queue,
        consumer=group.consumer,
        count=group.count,
        uuid=group.uuid,
        text=group.text if record is None else Redactor(record).text(group.text),
        remedy=group.remedy,
        command=await _command(context, group),
        since=group.since,
        until=group.until,
        blocking_task=group.blocker,
    )


async def _command(context: YardContext, group: WaitGroup) -> str:
    """What to type; empty if no command frees these tasks."""
    queue = shlex.quote(group.queue)
    match group.reason:
        case Reason.HELD:
            return _bulk(group, "release", "paused")
        case Reason.SCHEDULED:
            return _bulk(group, "start", "scheduled")
        case Reason.BACKOFF:
            return _bulk(group, "start", "retrying")
        case Reason.DEPENDENCY | Reason.HEAD_OF_LINE if group.blocker is not None:
            return f"taskyard why {group.blocker}"
        case Reason.KEY_BUSY if group.blocker is not None:
            return f"taskyard cancel {group.blocker}"
        case Reason.QUEUE_PAUSED:
            return f"taskyard queue resume {queue}"
        case Reason.QUEUE_FULL:
            status = await context.yard.queue(group.queue).status()
            said = status.control.concurrency
            limit = status.settings.concurrency if said is None else said
            return "" if limit is None else f"taskyard queue set {queue} --concurrency {limit + 1}"
        case Reason.NO_NODE | Reason.CONSUMER_FULL | Reason.EXECUTOR_FULL | Reason.NODES_FULL:
            return f"taskyard worker {shlex.quote(context.app or 'module:yard')}"
        case Reason.NO_DEVICE | Reason.DEVICES_BUSY:
            return "taskyard device ls"
        case Reason.TURN:
            return f"taskyard queue show {queue}"
        case _:
            return ""


def _bulk(group: WaitGroup, verb: str, state: str) -> str:
    if group.count == 1:
        return f"taskyard {verb} {group.uuid}"
    return f"taskyard {verb} --all --queue {shlex.quote(group.queue)} --state {state}"
