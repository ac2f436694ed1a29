"""What people and code ask of a yard that is open: how its queues and tasks are doing, why they wait, what happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from datetime import datetime
from uuid import UUID

from taskyard.artifact_files import read_file
from taskyard.catalogue import Catalogue, read_catalogue
from taskyard.errors import InvalidInput, UnknownArtifact, UnknownTask, shorten
from taskyard.event_tail import EventTail
from taskyard.listening import check_after, make_filter
from taskyard.model.attempt import AttemptArtifact, AttemptLine
from taskyard.model.audit import CODE, AuditEntry, AuditFilter, TargetKind, make_entry
from taskyard.model.command import Command
from taskyard.model.event import Event, EventKind
from taskyard.model.failures import FailureGroup
from taskyard.model.given import AnyTask, check_by, check_count, check_name, check_time, check_uuid
from taskyard.model.kinds import checked_verbs
from taskyard.model.queue import QueueStatus
from taskyard.model.task import DEFAULT_QUEUE, Attempt, TaskRecord
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.why import Why
from taskyard.model.why_groups import WaitSummary
from taskyard.opened import Opened
from taskyard.queueing.audit import finish_audit
from taskyard.queueing.controller import QueueController, TaskSteering, ask_one
from taskyard.queueing.matching import Matching
from taskyard.queueing.waiting import explain_all, explain_waits

PRUNE_BATCH = 500
"""Tasks that are forgotten in one transaction."""


@checked_verbs
class YardSteering(Opened, TaskSteering):
    """The part of a yard that needs no consumers: any process on the store may look and steer."""

    def __init__(self) -> None:
        super().__init__()
        self._tail: EventTail | None = None

    async def _close_tail(self) -> None:
        """Subscribers to events get what has happened until now, then their streams end."""
        # Race: a subscription may begin while the tail closes. It finds the closed tail, and ends.
        try:
            if self._tail is not None:
                await self._tail.close()
        finally:
            self._tail = None

    def queue(self, name: str = DEFAULT_QUEUE, *, by: str = CODE) -> QueueController:
        """All that a person can do to a queue: `await yard.queue("cpu").pause(reason="backup")`. `by` is the actor."""
        return QueueController(name, self._engine, by=by)

    async def queues(self) -> list[QueueStatus]:
        """Every queue that has rules, tasks, or something said about it."""
        return await self.store.queues()

    async def catalogue(self) -> Catalogue:
        """The consumers that the nodes of the store serve, with the JSON schemas of their arguments and results; also
        those that a node served last in the past week."""
        return await read_catalogue(self.store)

    async def why(self, uuid: AnyTask) -> Why | None:
        """What holds a task that waits: a reason, since when, what would free it, and which task is in the way. None
        if it runs or has ended. Of a run whose node is silent: since when, and which node takes it back. Any process
        may ask, also one that runs no tasks."""
        asked = check_uuid(uuid)
        record = await self.store.find(asked)
        if record is None:
            raise UnknownTask(asked)
        return (await self.why_many([record]))[0]

    async def why_many(self, records: Sequence[TaskRecord]) -> list[Why | None]:
        """The same for each of these, as they are listed, at the price of one."""
        return await explain_waits(self.store, records)

    async def why_all(self, where: TaskFilter = ALL_TASKS) -> WaitSummary:
        """The reasons of all tasks that wait and match, added up: how many wait for what, the largest groups first. Up
        to 10,000 tasks each is explained; of more, so many are drawn, and the counts are estimates (`is_sampled`)."""
        return await explain_all(self.store, where)

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 100) -> list[FailureGroup]:
        """The failed tasks that match, grouped by class of error and source, those in quarantine apart, the largest
        groups first. `attempts` says how each attempt of one ended; `retry`, `matching` and `run_again` send them
        again."""
        return await self.store.failures(where, limit=check_count("limit", limit, least=1))

    async def attempts(self, uuid: AnyTask) -> list[Attempt]:
        """The attempts of a task in order, the latest hundred; one that runs comes last."""
        return await self.store.list_attempts(check_uuid(uuid))

    async def log_lines(self, uuid: AnyTask, attempt: int | None = None, *, limit: int = 1000) -> list[AttemptLine]:
        """The latest log lines of a task, or of one of its attempts (1 is the first), oldest first. An attempt that was
        given back shares its number with the next one: both count."""
        asked, limit = check_uuid(uuid), check_count("limit", limit, least=1)
        if attempt is None:
            return await self.store.list_lines(asked, limit=limit)
        lines: list[AttemptLine] = []
        for token in await self._find_tokens(asked, attempt):
            lines += await self.store.list_lines(asked, token=token, limit=limit)
        return lines[-limit:]

    async def artifacts(self, uuid: AnyTask) -> list[AttemptArtifact]:
        """The artifacts of a task, by attempt and name, without their content."""
        return await self.store.list_artifacts(check_uuid(uuid))

    async def read_artifact(self, uuid: AnyTask, name: str, attempt: int | None = None) -> bytes:
        """The content of an artifact: that of the latest attempt that has one of this name, or of the attempt given.
        `UnknownArtifact` if there is none; `ArtifactElsewhere`, with host and path, if it is a file of another machine
        or the file is gone; `InvalidInput` if the file was changed."""
        asked = check_uuid(uuid)
        known = await self.store.list_artifacts(asked)
        tokens = [one.token for one in known if one.artifact.name == name]
        if attempt is not None:
            asked_for = await self._find_tokens(asked, attempt)
            tokens = [one for one in tokens if one in asked_for]
        found = await self.store.find_artifact(asked, tokens[-1], name) if tokens else None
        if found is None:
            raise UnknownArtifact(asked, name, sorted({one.artifact.name for one in known}))
        if found.data is not None:
            return found.data
        return await asyncio.to_thread(read_file, found)

    async def _find_tokens(self, uuid: str, attempt: int) -> list[int]:
        """Those of the attempts with this number."""
        check_count("attempt", attempt, least=1)
        attempts = await self.store.list_attempts(uuid)
        tokens = [one.token for one in attempts if one.attempt == attempt]
        if not tokens:
            kept = f"{attempts[0].attempt} to {attempts[-1].attempt}" if attempts else "none"
            raise InvalidInput(f"task {shorten(uuid)} has no attempt {attempt}; it has {kept}")
        return tokens

    def matching(self, where: TaskFilter = ALL_TASKS, *, by: str = "") -> Matching:
        """All tasks that match, to do something with: `await yard.matching(TaskFilter(error="OSError")).retry()`."""
        return Matching(where, self._engine, by=by)

    async def _ask(self, uuid: AnyTask, command: Command, by: str) -> TaskRecord:
        return await ask_one(self._engine, uuid, command, by=by)

    async def drain(self, node: str, *, on: bool = True, by: str = "") -> None:
        """Ask a node, by its incarnation, to take no new tasks, or take that back. `UnknownNode` if there is none. A
        worker that is drained ends when what it runs has ended. `by` is the actor."""
        check_by(by)
        audit = make_entry(by, "drain" if on else "undrain", TargetKind.NODE, node, now=self._engine.clock.now())
        await self.store.drain(node, on=on, audit=audit)

    async def prune(self, finished_before: datetime, *, failed: bool | None = None, by: str = "") -> int:
        """Forget the tasks that ended before then, with their attempts, log lines and artifacts; how many they were.
        `failed` means those that failed, or the others alone. `by` is the actor."""
        check_by(by)
        before, now = check_time("finished_before", finished_before), self._engine.clock.now()
        details = {"finished_before": before.isoformat()} | ({} if failed is None else {"failed": failed})
        audit = make_entry(by, "prune", TargetKind.TASKS, now=now, details=details, is_finished=False)
        pruned = 0
        while batch := await self.store.prune(finished_before=before, limit=PRUNE_BATCH, failed=failed, audit=audit):
            pruned += batch
        await finish_audit(self.store.put_audit, audit, matched=pruned, changed=pruned)
        return pruned

    async def audit(
        self,
        *,
        by: str | None = None,
        command: str | None = None,
        task: AnyTask | None = None,
        queue: str | None = None,
        device: str | None = None,
        since: datetime | None = None,
        before_id: int | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """What people asked for, newest first: one entry per call that named an actor with `by`, however many tasks it
        changed. All of it, or that of one actor (`ana`, or `cli:ana` for the command line alone), of one command, about
        one task, queue or device, or since a time. Go on with `before_id`, the `id` of the last entry seen."""
        where = AuditFilter.of(
            by=None if by is None else check_name("by", by),
            command=None if command is None else check_name("command", command),
            task=None if task is None else check_uuid(task),
            queue=None if queue is None else check_name("queue", queue),
            device=None if device is None else check_name("device", device),
            since=None if since is None else check_time("since", since),
        )
        return await self.store.list_audit(where, before_id=before_id, limit=check_count("limit", limit, least=1))

    async def events(
        self,
        *,
        after: int | None = None,
        kinds: Iterable[EventKind | str] | EventKind | str | None = None,
        queue: str | None = None,
        consumer: str | None = None,
        task: AnyTask | None = None,
        group: str | UUID | None = None,
    ) -> AsyncGenerator[Event, None]:
        """What happens from now on, or after event number `after`, in this process and in others, until the yard is
        closed: all of it, or only what is of these `kinds`, and of this queue, consumer, task or group (its summary
        included). Pass the `seq` of the last event as `after` to go on there, with the same filter or another.

        All subscribers of a yard share one reader of the store, however many there are; a slow one holds up nobody.

        A store that is away is waited for. A reader so far behind that the store has forgotten some (it keeps the last
        10,000 or more), or with a number that a store which was restored has not come to, gets `EventsMissed`: look at
        the records, then start anew."""
        after, store, engine = check_after(after), self.store, self._engine
        if after is None:
            after = (await store.events(after=-1)).last  # before the tasks of a group are looked up
        where = await make_filter(store, kinds=kinds, queue=queue, consumer=consumer, task=task, group=group)
        if self._open_engine is not engine:
            return
        if self._tail is None:
            self._tail = EventTail(store, engine.changes)
        async with aclosing(self._tail.follow(after=after, where=where)) as events:
            async for event in events:
                yield event
