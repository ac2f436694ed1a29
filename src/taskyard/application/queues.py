"""Queues: what each holds, and commands on a queue as a whole."""

from __future__ import annotations

from taskyard.application.calls import YardContext, check_queue_known
from taskyard.application.command_requests import Pause, QueueCommand, Resume, SetConcurrency, StopAfterCurrent
from taskyard.application.queue_documents import QueueDocument
from taskyard.application.queue_order import find_order
from taskyard.application.queue_order_documents import QueueOrderDocument
from taskyard.application.rates import read_rates
from taskyard.model.queue import QueueStatus
from taskyard.model.state import TaskState


class LocalQueues:
    """`QueueCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    async def list(self) -> tuple[QueueDocument, ...]:
        yard = self._context.yard
        found = await yard.queues()
        rates = await read_rates(yard.store, yard.now())
        return tuple(queue_document(status, rate=rates.get(status.name, 0.0)) for status in found)

    async def order(self, name: str, *, limit: int = 20, concurrency: int | None = None) -> QueueOrderDocument:
        await check_queue_known(self._context, name)
        return await find_order(self._context.yard, name, limit=limit, concurrency=concurrency)

    async def apply(self, name: str, command: QueueCommand) -> QueueDocument:
        await check_queue_known(self._context, name)
        queue = self._context.yard.queue(name, by=self._context.actor)
        match command:
            case Pause(reason=reason):
                return queue_document(await queue.pause(reason=reason))
            case Resume():
                return queue_document(await queue.resume())
            case StopAfterCurrent(reason=reason):
                return queue_document(await queue.stop_after_current(reason=reason))
            case SetConcurrency(concurrency=concurrency, reason=reason):
                return queue_document(await queue.set_concurrency(concurrency, reason=reason))


def queue_document(status: QueueStatus, *, rate: float | None = None) -> QueueDocument:
    settings, control = status.settings, status.control
    return QueueDocument(
        name=status.name,
        state=control.state,
        state_set=control.state_set,
        running=status.counts.get(TaskState.RUNNING, 0),
        concurrency=settings.concurrency if control.concurrency is None else control.concurrency,
        concurrency_override=control.concurrency,
        code_concurrency=settings.concurrency,
        concurrency_set=control.concurrency_set,
        order=settings.order,
        per_key=settings.per_key,
        counts=status.counts,
        oldest_due_at=status.oldest_due_at,
        rate=rate,
    )
