"""What every call of the local application has: the yard, the actor, and the checks of names that people give.

A queue or a consumer comes into being when it is named. So a slip of the pen would pause a queue that no task is in, or
find no task of a consumer: names that nothing on the store knows are refused.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from taskyard.application.errors import AppNotFound, NoSuchConsumer, UnknownQueue
from taskyard.model.given import check_count
from taskyard.model.task import DEFAULT_QUEUE
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.schedules import ScheduleStore
from taskyard.yard import Yard

SUGGESTION_TASKS = 100
"""The newest tasks whose consumers are suggested for a name that is unknown."""

LARGEST_LIMIT = 10_000
"""Items of one answer: what is read of them stays in memory until the answer is sent. A longer list is read page by
page."""


@dataclass(frozen=True, slots=True)
class YardContext:
    """The open yard of an application, the actor that asks, and the name of the app if there is one."""

    yard: Yard
    actor: str
    app: str | None = None


def check_limit(limit: int, *, field: str = "limit") -> int:
    """`limit` if one answer may have so many items. Raises `InvalidInput`."""
    return check_count(field, limit, least=1, most=LARGEST_LIMIT)


async def check_queue_known(context: YardContext, name: str) -> None:
    """Raise `UnknownQueue` unless the queue has rules, tasks or a node that serves it."""
    yard = context.yard
    known = {DEFAULT_QUEUE, *(status.name for status in await yard.queues())}
    known.update(queue for status in await yard.store.nodes() for queue in status.node.queues)
    if name not in known:
        raise UnknownQueue(name, sorted(known))


async def check_consumer_known(context: YardContext, name: str) -> None:
    """Raise `NoSuchConsumer` unless the app, a node, a schedule or a stored task has this consumer."""
    yard, store = context.yard, context.yard.store
    known = {*yard.consumers, *(consumer for status in await store.nodes() for consumer in status.node.consumers)}
    if isinstance(store, ScheduleStore):
        known.update(status.schedule.consumer for status in await store.schedules() if status.schedule is not None)
    if name in known or await store.list_ids(TaskFilter(consumer=name), limit=1):
        return
    if context.app is not None:
        from taskyard.application.opening import load_yard

        with suppress(AppNotFound):  # the call itself does not need it
            known.update(load_yard(context.app).consumers)
    if name not in known:
        known.update(task.consumer for task in await store.list_tasks(limit=SUGGESTION_TASKS))
        raise NoSuchConsumer(name, sorted(known))


async def check_filter_names(context: YardContext, where: TaskFilter) -> None:
    """Raise `UnknownQueue` or `NoSuchConsumer` if the filter names one."""
    if where.queue is not None:
        await check_queue_known(context, where.queue)
    if where.consumer is not None:
        await check_consumer_known(context, where.consumer)


async def explain_no_match(context: YardContext, where: TaskFilter) -> str:
    """Why no task can match the filter: it names an unknown queue or consumer. Empty if it does not."""
    try:
        await check_filter_names(context, where)
    except (UnknownQueue, NoSuchConsumer) as unknown:
        return str(unknown)
    return ""
