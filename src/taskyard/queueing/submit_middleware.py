"""Middleware around submits: what it sees of the tasks, and how one function leads to the next.

Every submit of a node goes through here before it reaches the store: one task, many, groups, tasks that run again and
those that schedules make. Without middleware nothing here is called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from taskyard.errors import MiddlewareFault, PayloadTooLarge
from taskyard.model.given import check_labels, check_name, check_priority, check_title
from taskyard.model.order import Priority
from taskyard.model.task import NO_EXTRA, TaskRecord, to_json
from taskyard.ports.consumer import Consumer
from taskyard.ports.middleware import AroundSubmit, Middleware, name_of
from taskyard.ports.schedules import Fired
from taskyard.ports.store import Added

_NOT_CALLED = "did not await call_next(); raise an exception, such as InvalidInput, to refuse a submit"
_NOT_AWAITED = "returned before its call_next() had; await it"


class TaskDraft:
    """A task that is about to be stored. Middleware may change what has a setter, and add `values`: JSON that is stored
    with the task, and reaches its runs as `current_run().values`."""

    __slots__ = ("_record", "_values")

    def __init__(self, record: TaskRecord) -> None:
        self._record = record
        self._values: dict[str, Any] | None = None

    @property
    def uuid(self) -> str:
        return self._record.uuid

    @property
    def consumer(self) -> str:
        return self._record.consumer

    @property
    def args(self) -> dict[str, Any]:
        """The arguments as they are stored: a copy."""
        args: dict[str, Any] = msgspec.json.decode(self._record.args)
        return args

    @property
    def origin(self) -> str | None:
        """The finished task that this one runs again."""
        return self._record.origin

    @property
    def group(self) -> str | None:
        return self._record.group_id

    @property
    def queue(self) -> str:
        return self._record.queue

    @queue.setter
    def queue(self, queue: str) -> None:
        self._record.queue = check_name("queue", queue)

    @property
    def priority(self) -> Priority:
        return Priority(self._record.priority)

    @priority.setter
    def priority(self, priority: Priority | str | int) -> None:
        self._record.priority = check_priority(priority).value

    @property
    def key(self) -> str | None:
        return self._record.key

    @key.setter
    def key(self, key: str | None) -> None:
        self._record.key = None if key is None else check_name("key", key)

    @property
    def requires(self) -> dict[str, str]:
        """The labels that the place where it runs must have."""
        return self._record.requirements

    @property
    def title(self) -> str:
        return self._record.title

    @title.setter
    def title(self, title: str) -> None:
        self._set_extra(title=check_title(title))

    @property
    def labels(self) -> dict[str, str]:
        """Its labels: a copy. Set it to change them."""
        return dict(self._record.labels)

    @labels.setter
    def labels(self, labels: Mapping[str, str]) -> None:
        self._set_extra(labels=check_labels(labels))

    @property
    def values(self) -> dict[str, Any]:
        """What middleware adds to the task: change it in place."""
        if self._values is None:
            self._values = dict(self._record.values)
        return self._values

    def _set_extra(self, **fields: Any) -> None:
        self._record.extra = msgspec.structs.replace(self._record.extra or NO_EXTRA, **fields)

    def keep(self, max_bytes: int) -> None:
        """Write the values into the record. Raises `NotJson` or `PayloadTooLarge`."""
        if self._values is None:
            return
        text = to_json("the values that middleware adds to a task", self._values)
        if len(text) * 4 > max_bytes and (size := len(text.encode())) > max_bytes:
            raise PayloadTooLarge("the values that middleware adds to a task", size, max_bytes)
        self._set_extra(values=msgspec.json.decode(text))
        if self._record.extra == NO_EXTRA:
            self._record.extra = None


class Submission:
    """Tasks that are submitted together: `tasks` are those that the middleware is for. `schedule` is the name of the
    schedule that submits them, if one does."""

    __slots__ = ("schedule", "tasks")

    def __init__(self, tasks: Sequence[TaskDraft], schedule: str | None = None) -> None:
        self.tasks, self.schedule = tasks, schedule


class SubmitChain:
    """The middleware of a yard and of its consumers, which come and go. That of the yard goes first."""

    def __init__(self, middleware: Sequence[Middleware], consumers: Mapping[str, Consumer], *, max_bytes: int) -> None:
        self._own = list_around_submit(middleware)
        self._consumers, self._max_bytes = consumers, max_bytes

    def applies_to(self, records: Sequence[TaskRecord]) -> bool:
        """Whether there is middleware for any of these."""
        if self._own:
            return True
        for name in {record.consumer for record in records}:
            consumer = self._consumers.get(name)
            if consumer is not None and consumer.middleware and list_around_submit(consumer.middleware):
                return True
        return False

    async def submit(self, records: Sequence[TaskRecord], send: Callable[[], Awaitable[list[Added]]]) -> list[Added]:
        """Submit these tasks by `send`, inside of the middleware."""
        return list(await self._run(records, send))

    async def fire(
        self, schedule: str, records: Sequence[TaskRecord], send: Callable[[], Awaitable[Fired | None]]
    ) -> Fired | None:
        """The same for tasks that a schedule makes. None, as an answer of `send`, is that nothing was stored."""
        if not self.applies_to(records):
            return await send()
        fired: Fired | None = None

        async def send_fires() -> list[Added]:
            nonlocal fired
            fired = await send()
            return [] if fired is None else [Added(uuid) for uuid in fired.made]

        await self._run(records, send_fires, schedule)
        return fired

    async def _run(
        self,
        records: Sequence[TaskRecord],
        send: Callable[[], Awaitable[Sequence[Added]]],
        schedule: str | None = None,
    ) -> Sequence[Added]:
        """Call the middleware, and `send` inside of it. What any of it raises is raised here, and unless it came after
        `send`, nothing was stored."""
        drafts = [TaskDraft(record) for record in records]
        steps = [(one, Submission(drafts, schedule)) for one in self._own]
        for name in dict.fromkeys(record.consumer for record in records):
            own = self._consumers.get(name)
            theirs = [draft for draft in drafts if draft.consumer == name]
            around = list_around_submit(() if own is None else own.middleware)
            steps += [(one, Submission(theirs, schedule)) for one in around]

        async def send_all() -> Sequence[Added]:
            for draft in drafts:
                draft.keep(self._max_bytes)
            return await send()

        return await _step(steps, 0, send_all)


async def _step(
    steps: Sequence[tuple[AroundSubmit, Submission]], place: int, send: Callable[[], Awaitable[Sequence[Added]]]
) -> Sequence[Added]:
    if place == len(steps):
        return await send()
    function, submission = steps[place]
    added: list[Sequence[Added]] = []
    raised: BaseException | None = None
    has_called = False

    async def call_next() -> Sequence[Added]:
        nonlocal has_called, raised
        if has_called:
            raise MiddlewareFault(name_of(function), "called call_next() twice, but a submit is stored once")
        has_called = True
        try:
            added.append(await _step(steps, place + 1, send))
        except BaseException as exc:
            raised = exc
            raise
        return added[0]

    try:
        await function(submission, call_next)
        if raised is not None:
            raise raised  # the middleware swallowed it; the submitter must know that the tasks may not be stored
        if not added:
            raise MiddlewareFault(name_of(function), _NOT_CALLED if not has_called else _NOT_AWAITED)
        return added[0]
    finally:
        raised = None  # its traceback holds this frame: a cycle that would wait for the garbage collector


def list_around_submit(middleware: Sequence[Middleware]) -> list[AroundSubmit]:
    return [one.around_submit for one in middleware if one.around_submit is not None]
