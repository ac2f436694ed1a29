"""`QueueController`: everything a person can do to one queue and to the tasks in it, as a value to hold in the hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.audit import CODE, AuditEntry, TargetKind, command_entry
from taskyard.model.command import (
    Cancel,
    Command,
    Hold,
    MoveAfter,
    MoveBefore,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
)
from taskyard.model.given import (
    AnyTask,
    check_by,
    check_count,
    check_name,
    check_priority,
    check_reason,
    check_time,
    check_uuid,
)
from taskyard.model.kinds import checked_verbs
from taskyard.model.order import Priority
from taskyard.model.queue import Pause, QueueCommand, QueueStatus, Resume, SetConcurrency, StopAfterCurrent
from taskyard.model.queue_order import LARGEST_LIMIT, QueueOrderView, QueueSnapshot
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.store import Applied
from taskyard.queueing.matching import Matching
from taskyard.queueing.order import find_order


class Steering(Protocol):
    """What a controller needs: a store's verbs, and that they take effect on this node at once."""

    @property
    def clock(self) -> Clock: ...

    async def control(
        self, queue: str, command: QueueCommand, *, by: str, audit: AuditEntry | None = ...
    ) -> QueueStatus: ...

    async def put_audit(self, entry: AuditEntry) -> None: ...

    async def queues(self) -> list[QueueStatus]: ...

    async def queue_snapshot(self, queue: str, *, limit: int) -> QueueSnapshot: ...

    async def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]: ...

    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = ...,
        where: TaskFilter = ...,
        audit: AuditEntry | None = ...,
    ) -> list[Applied]: ...

    async def list_ids(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[tuple[int, str]]: ...

    async def list_tasks(self, where: TaskFilter, *, before_id: int | None, limit: int) -> list[TaskRecord]: ...


@checked_verbs
class TaskSteering(ABC):
    """The verbs for one task; whoever has them says where they go. Each answers with the task as it is then, and raises
    `CommandRefused` with the state it found if it no longer fits, `UnknownTask` if there is none. `by` is who asks: it
    is kept in the task's note, until something newer is noted there."""

    @abstractmethod
    async def _ask(self, uuid: AnyTask, command: Command, by: str) -> TaskRecord: ...

    async def cancel(self, uuid: AnyTask, *, reason: str = "", force: bool = False, by: str = "") -> TaskRecord:
        """End a task: at once when it waits; when it runs, its run is asked to stop, and it is canceled when it has.
        With `force` it is killed at once, where its executor can: what it was writing may be damaged."""
        return await self._ask(uuid, Cancel(check_reason(reason), force), by)

    async def retry(self, uuid: AnyTask, *, to_head: bool = True, by: str = "") -> TaskRecord:
        """Send a failed or interrupted task again, at the head of its priority or at the tail."""
        return await self._ask(uuid, Retry(to_head), by)

    async def set_priority(self, uuid: AnyTask, priority: Priority | str, *, by: str = "") -> TaskRecord:
        """Change the priority of a task that has not started."""
        return await self._ask(uuid, SetPriority(check_priority(priority)), by)

    async def hold(self, uuid: AnyTask, *, reason: str = "", by: str = "") -> TaskRecord:
        """Keep a task that has not started from starting, until it is released."""
        return await self._ask(uuid, Hold(check_reason(reason)), by)

    async def release(self, uuid: AnyTask, *, by: str = "") -> TaskRecord:
        """Let a held task go: to its old place, or on waiting for its time."""
        return await self._ask(uuid, Release(), by)

    async def skip(self, uuid: AnyTask, *, reason: str = "", by: str = "") -> TaskRecord:
        """End a task that has not started, as skipped."""
        return await self._ask(uuid, Skip(check_reason(reason)), by)

    async def start_now(self, uuid: AnyTask, *, urgent: bool = False, by: str = "") -> TaskRecord:
        """Put it at the head of its priority, or of the high ones if `urgent`; what runs is not disturbed."""
        return await self._ask(uuid, StartNow(urgent), by)

    async def move(
        self, uuid: AnyTask, *, before: AnyTask | None = None, after: AnyTask | None = None, by: str = ""
    ) -> TaskRecord:
        """Put it right before, or right after, another task of its queue and priority."""
        if (before is None) == (after is None):
            raise InvalidInput("say before= or after= which other task it is to be put")
        if before is not None:
            return await self._ask(uuid, MoveBefore(check_uuid(before)), by)
        return await self._ask(uuid, MoveAfter(check_uuid(after)), by)

    async def reschedule(self, uuid: AnyTask, at: datetime, *, by: str = "") -> TaskRecord:
        """Make a task that has not started due at another time, earlier or later."""
        return await self._ask(uuid, Reschedule(check_time("at", at)), by)


async def ask_one(
    steering: Steering, uuid: AnyTask, command: Command, *, by: str, where: TaskFilter | None = None
) -> TaskRecord:
    """Carry out a command for one task, or raise why not."""
    check_by(by)
    asked = check_uuid(uuid)
    audit = command_entry(by, command, TargetKind.TASK, asked, now=steering.clock.now())
    (applied,) = await steering.apply([asked], command, by=by, where=where or TaskFilter(), audit=audit)
    if applied.refused is not None:
        raise applied.refused
    assert applied.record is not None
    return applied.record


@checked_verbs
class QueueController(TaskSteering):
    """One queue, as people steer it, from any process. What is said of it is kept with `by`, the time and the reason,
    and survives restarts; every answer is the queue as it is then. Its tasks are steered by the verbs of
    `TaskSteering`, one that is in another queue is refused; all that match something, by `matching`."""

    def __init__(self, name: str, steering: Steering, *, by: str = CODE) -> None:
        self.name = check_name("the name of a queue", name)
        self._steering, self._by = steering, check_name("by", by)

    def __repr__(self) -> str:
        return f"QueueController({self.name!r})"

    async def status(self) -> QueueStatus:
        """Its rules, what people have said about it, and what it holds."""
        known = {status.name: status for status in await self._steering.queues()}
        return known.get(self.name) or QueueStatus.empty(self.name)

    async def order(self, *, limit: int = 20, concurrency: int | None = None) -> QueueOrderView:
        """What runs; what waits, in the order in which it will start, with place and expected start; and what is held,
        blocked or waits for its time. At most `limit` tasks of each are listed, up to 1,000. Expected times come from
        the medians of the consumers' latest runs. With `concurrency` it also says when all would be over if so many
        ran at once: `(await yard.queue("cpu").order(concurrency=2)).what_if`."""
        check_count("limit", limit, least=1, most=LARGEST_LIMIT)
        if concurrency is not None:
            check_count("concurrency", concurrency, least=1)
        return await find_order(self._steering, self.name, limit=limit, concurrency=concurrency)

    async def pause(self, *, reason: str = "") -> QueueStatus:
        """Start nothing more; what runs goes on."""
        return await self._say(Pause(check_reason(reason)))

    async def resume(self) -> QueueStatus:
        """Start tasks again; takes back a stop as well, while it lasts and afterwards."""
        return await self._say(Resume())

    async def stop_after_current(self, *, reason: str = "") -> QueueStatus:
        """Pause, and be `stopping` until what runs has ended."""
        return await self._say(StopAfterCurrent(check_reason(reason)))

    async def set_concurrency(self, concurrency: int | None, *, reason: str = "") -> QueueStatus:
        """Run at most so many at once, whatever the queue's own rules say; None goes back to those."""
        if concurrency is not None:
            check_count("concurrency", concurrency, least=1, hint=", or None for the queue's own rule")
        return await self._say(SetConcurrency(concurrency, check_reason(reason)))

    async def _say(self, command: QueueCommand) -> QueueStatus:
        audit = command_entry(self._by, command, TargetKind.QUEUE, self.name, now=self._steering.clock.now())
        return await self._steering.control(self.name, command, by=self._by, audit=audit)

    async def _ask(self, uuid: AnyTask, command: Command, by: str) -> TaskRecord:
        own = TaskFilter(queue=self.name)
        return await ask_one(self._steering, uuid, command, by=by or self._by, where=own)

    def matching(self, where: TaskFilter | None = None) -> Matching:
        """All tasks of this queue that match, to do something with."""
        if where is not None and where.queue not in {None, self.name}:
            raise InvalidInput(f"the filter names queue {quote(where.queue)}; this is {quote(self.name)}")
        own = msgspec.structs.replace(where or TaskFilter(), queue=self.name)
        return Matching(own, self._steering, by=self._by)
