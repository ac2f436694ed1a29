"""What people and code ask of a yard that is open: how its queues and tasks are doing, why they wait, what happens."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from uuid import UUID

from taskyard.errors import UnknownTask
from taskyard.listening import check_after, follow, make_filter
from taskyard.model.command import Command
from taskyard.model.event import Event, EventKind
from taskyard.model.failures import FailureGroup
from taskyard.model.given import AnyTask, check_count, check_uuid
from taskyard.model.kinds import checked_verbs
from taskyard.model.task import DEFAULT_QUEUE, Run, TaskRecord
from taskyard.model.why import Why
from taskyard.opened import Opened
from taskyard.ports.store import ANY, QueueStatus, TaskFilter
from taskyard.queueing.controller import CODE, QueueController, TaskSteering, ask_one
from taskyard.queueing.matching import Matching
from taskyard.queueing.waiting import explain_waits


@checked_verbs
class YardSteering(Opened, TaskSteering):
    """The part of a yard that needs no consumers: any process on the store may look and steer."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: weakref.WeakSet[asyncio.Event] = weakref.WeakSet()

    def _closed(self) -> None:
        super()._closed()
        for changes in self._streams:
            changes.set()

    def queue(self, name: str = DEFAULT_QUEUE, *, by: str = CODE) -> QueueController:
        """Everything a person can do to a queue: `await yard.queue("cpu").pause(reason="backup")`. `by` says who."""
        return QueueController(name, self.engine, by=by)

    async def queues(self) -> list[QueueStatus]:
        """Every queue that has rules, tasks, or something said about it."""
        return await self.store.queues()

    async def why(self, uuid: AnyTask) -> Why | None:
        """What holds a task that waits: a reason, since when, what would free it, and who is in the way. None if it
        runs or has ended; of one whose node is silent, that, since when, and who takes it back. Any process may ask,
        whoever runs the tasks."""
        asked = check_uuid(uuid)
        record = await self.store.find(asked)
        if record is None:
            raise UnknownTask(asked)
        return (await self.why_many([record]))[0]

    async def why_many(self, records: Sequence[TaskRecord]) -> list[Why | None]:
        """The same for each of these, as they are listed, at the price of one."""
        return await explain_waits(self.store, records)

    async def failures(self, where: TaskFilter = ANY, *, limit: int = 100) -> list[FailureGroup]:
        """The failed tasks that match, grouped by class of error and source, those in quarantine apart, the largest
        groups first. What each run of one ended with: `runs`; to send them again: `retry`, `matching`, `run_again`."""
        return await self.store.failures(where, limit=check_count("limit", limit, least=1))

    async def runs(self, uuid: AnyTask) -> list[Run]:
        """The attempts of a task that have ended, in order, each with its error; the latest hundred."""
        return await self.store.list_runs(check_uuid(uuid))

    def matching(self, where: TaskFilter = ANY, *, by: str = "") -> Matching:
        """All tasks that match, to do something with: `await yard.matching(TaskFilter(error="OSError")).retry()`."""
        return Matching(where, self.engine, by=by)

    async def _ask(self, uuid: AnyTask, command: Command, by: str) -> TaskRecord:
        return await ask_one(self.engine, uuid, command, by=by)

    async def events(
        self,
        *,
        after: int | None = None,
        kinds: Iterable[EventKind | str] | EventKind | str | None = None,
        queue: str | None = None,
        source: str | None = None,
        task: AnyTask | None = None,
        group: str | UUID | None = None,
    ) -> AsyncGenerator[Event, None]:
        """What happens from now on, or after event number `after`, in this process and in others, until the yard is
        closed: all of it, or only what is of these `kinds`, and of this queue, consumer, task or group (its summary
        included). Who remembers the `seq` of the last event goes on there, with the same filter or another.

        A store that is away is waited for. A reader so far behind that the store has forgotten some (it keeps the last
        10,000 or more), or with a number that a store which was restored has not come to, gets `EventsMissed`: look at
        the records, then start anew."""
        after, store, engine = check_after(after), self.store, self.engine
        if after is None:
            after = (await store.events(after=-1)).last  # before the tasks of a group are looked up
        where = await make_filter(store, kinds=kinds, queue=queue, source=source, task=task, group=group)
        with engine.changes() as changes:
            self._streams.add(changes)
            async with aclosing(
                follow(store, changes, lambda: self._engine is engine, after=after, where=where)
            ) as events:
                async for event in events:
                    yield event
