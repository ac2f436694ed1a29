"""Values of the wrong kind, given to every verb that people and code use: each is told, none ends in Python's words."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from taskyard import (
    BaseTaskConsumer,
    Group,
    InvalidInput,
    QueueController,
    StandaloneQueue,
    Task,
    TaskConsumerRegistry,
    TaskFilter,
    TaskState,
    TaskyardError,
    Yard,
)
from taskyard.errors import UnknownGroup, UnknownTask
from taskyard.model.task import new_uuid
from taskyard.queueing.matching import Matching
from taskyard.schedules import Schedules
from tests.scenario.jobs import build

SOON = datetime(2030, 1, 1, tzinfo=UTC)
PAST = datetime(2026, 1, 1, tzinfo=UTC)
ID = new_uuid()

TASKS: dict[str, dict[str, Any]] = {
    "cancel": {"uuid": ID, "reason": "r", "force": False, "by": "ann"},
    "retry": {"uuid": ID, "to_head": True, "by": "ann"},
    "set_priority": {"uuid": ID, "priority": "high", "by": "ann"},
    "hold": {"uuid": ID, "reason": "r", "by": "ann"},
    "release": {"uuid": ID, "by": "ann"},
    "skip": {"uuid": ID, "reason": "r", "by": "ann"},
    "start_now": {"uuid": ID, "urgent": False, "by": "ann"},
    "move": {"uuid": ID, "before": ID, "after": None, "by": "ann"},
    "reschedule": {"uuid": ID, "at": SOON, "by": "ann"},
}
QUEUE: dict[str, dict[str, Any]] = TASKS | {
    "status": {},
    "pause": {"reason": "r"},
    "resume": {},
    "stop_after_current": {"reason": "r"},
    "set_concurrency": {"concurrency": 3, "reason": "r"},
    "order": {"limit": 20, "concurrency": 2},
    "matching": {"where": TaskFilter()},
}
VERBS: dict[type, dict[str, dict[str, Any]]] = {
    QueueController: QUEUE,
    StandaloneQueue: QUEUE
    | {"why": {"uuid": ID}, "outcome": {"uuid": ID}, "get": {"uuid": ID}, "add": {"priority": "high", "key": "k"}},
    Matching: {
        "count": {},
        "cancel": {"reason": "r", "force": False, "dry_run": True},
        "retry": {"to_head": True, "include_quarantined": False, "dry_run": True},
        "skip": {"reason": "r", "dry_run": True},
        "hold": {"reason": "r", "dry_run": True},
        "release": {"dry_run": True},
        "set_priority": {"priority": "low", "dry_run": True},
        "reschedule": {"at": SOON, "dry_run": True},
        "start_now": {"urgent": False, "dry_run": True},
    },
    Schedules: {
        "define": {"name": "n", "rule": "@daily", "consumer": "add", "args": {"a": 1}, "zone": "UTC"},
        "add": {"name": "n", "rule": "@daily", "consumer": "add", "args": {"a": 1}, "zone": "UTC", "by": "ann"},
        "remove": {"name": "n"},
        "pause": {"name": "n", "note": "t", "by": "ann"},
        "resume": {"name": "n"},
        "run_now": {"name": "n"},
        "run_each": {"name": "n"},
        "backfill": {"name": "n", "start": PAST, "end": PAST + timedelta(days=2), "limit": 5, "again": False},
        "get": {"name": "n"},
        "list_all": {},
        "list_fires": {"name": "n", "limit": 3},
    },
    Group: {
        "progress": {},
        "cancel": {"reason": "r", "by": "ann"},
        "retry": {"include_quarantined": False, "by": "ann"},
    },
    Yard: TASKS
    | {
        "queue": {"name": "q", "by": "ann"},
        "why": {"uuid": ID},
        "why_many": {"records": []},
        "failures": {"where": TaskFilter(), "limit": 5},
        "attempts": {"uuid": ID},
        "matching": {"where": TaskFilter(), "by": "ann"},
        "submit": {"name": "add", "args": {"a": 1}},
        "submit_many": {"name": "add", "arguments": [{"a": 1}]},
        "bind": {"name": "add", "args": {"a": 1}},
        "submit_group": {"tasks": [], "summary": None},
        "group": {"uuid": ID},
        "handle": {"uuid": ID},
        "run_again": {"uuid": ID, "args": None, "changes": {"a": 2}, "by": "ann"},
        "run_all_again": {"where": TaskFilter(), "changes": {"a": 2}, "dry_run": True, "by": "ann"},
        "keep_latest": {"count": 5},
        "keep_failed": {"age_s": 5.0, "latest": 5},
        "define_queue": {"name": "q", "concurrency": 2, "per_key": 1, "auto_recover": 1, "order": "fifo"},
        "unregister": {"name": "add"},
        "register": {"consumer": None},
    },
}
SAID = {"reason", "note"}
"""Arguments that are people's own words."""

BEFORE_OPENING = {"define", "define_queue", "keep_latest", "keep_failed", "register", "unregister"}
ELSEWHERE: dict[type, set[str]] = {
    QueueController: set(),
    StandaloneQueue: set(),
    Matching: {"apply"},
    Schedules: {"register", "put", "make", "next_fires"},
    Group: set(),
}
"""Verbs that take values of ours, which are checked when they are made."""

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - a time without a zone is the point
WRONG: list[Any] = [5, -1, 1e300, None, True, b"x", "", "\0", "\ud800", [], {}, {"a": "b"}, object(), Yard, NAIVE]


class Doubling(BaseTaskConsumer):
    """Something for a queue alone."""

    name = "double"

    async def consume(self, task: Task) -> int:
        return 2


@asynccontextmanager
async def a_target(kind: type, verb: str) -> AsyncIterator[Any]:
    """Something of this kind, ready for the verb."""
    if kind is StandaloneQueue:
        registry = TaskConsumerRegistry()
        registry.register(Doubling())
        async with StandaloneQueue(registry) as alone:
            yield alone
        return
    yard = Yard("memory://")

    @yard.consumer
    async def add(a: int) -> int:
        return a

    if verb in BEFORE_OPENING:
        yield yard.schedules if kind is Schedules else yard
        return
    async with yard:
        await yard.schedules.add("n", "@daily", add, {"a": 1})
        made: dict[type, Callable[[], Any]] = {
            QueueController: lambda: yard.queue("q"),
            Matching: yard.matching,
            Schedules: lambda: yard.schedules,
            Group: lambda: yard.group(ID),
            Yard: lambda: yard,
        }
        yield made[kind]()


async def call(target: Any, verb: str, given: dict[str, Any]) -> None:
    answer = getattr(target, verb)(**given)
    if inspect.isawaitable(answer):
        await answer


async def error_of(asked: Awaitable[None]) -> Exception | None:
    try:
        await asked
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kind", "verb"), [pytest.param(kind, verb, id=f"{kind.__name__}-{verb}") for kind in VERBS for verb in VERBS[kind]]
)
async def test_a_value_of_the_wrong_kind_is_told(kind: type, verb: str):
    """Whatever is given to a verb for whichever of its arguments: it is taken, or refused by an error of ours."""
    good = VERBS[kind][verb]
    for name in good:
        for wrong in WRONG:
            async with a_target(kind, verb) as target:
                error = await error_of(call(target, verb, good | {name: wrong}))
            assert error is None or isinstance(error, TaskyardError), f"{name}={wrong!r}: {error!r}"


def test_every_verb_is_tried():
    """A verb that is new has to be in the table."""
    for kind, beside in ELSEWHERE.items():
        public = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        assert public - beside == set(VERBS[kind]), kind


REFUSED = [
    ("cancel", {"uuid": 5}, "uuid must be a string of 1 to 200 characters, not 5"),
    ("cancel", {"uuid": ID, "reason": None}, "reason must be a string, not None"),
    ("cancel", {"uuid": ID, "force": "no"}, "force must be True or False, not 'no'"),
    ("hold", {"uuid": ID, "by": b"ann"}, "by must be a string, not b'ann'"),
    ("hold", {"uuid": ID, "by": "a\0"}, "by must be text without NUL"),
    ("hold", {"uuid": ID, "by": "a" * 300}, "by must be a string of 1 to 200 characters"),
    ("matching", {"by": "a" * 300}, "by must be a string of 1 to 200 characters"),
    ("matching", {"where": {"queue": "q"}}, "where must be a TaskFilter, not {'queue': 'q'}"),
    ("failures", {"where": None}, "where must be a TaskFilter, not None"),
    ("run_all_again", {"dry_run": 1}, "dry_run must be True or False, not 1"),
    ("run_again", {"uuid": ID, "args": [1]}, "args must be a dict or None"),
    ("why_many", {"records": "abc"}, "records must be a list, not 'abc'"),
    ("submit_group", {"tasks": None}, "tasks must be a list, not None"),
    ("submit_group", {"tasks": [5]}, "a group is made of bound tasks"),
    ("register", {"consumer": 5}, "consumer must be a BaseTaskConsumer, not 5"),
]


@pytest.mark.parametrize(("verb", "given", "words"), [pytest.param(*row, id=row[2][:40]) for row in REFUSED])
async def test_what_is_refused_is_said_in_words(verb: str, given: dict[str, Any], words: str):
    """The argument is named, with what it may be and what it was."""
    async with a_target(Yard, verb) as yard:
        with pytest.raises(InvalidInput, match=f"^{words}"):
            await call(yard, verb, given)


WORDS = [(kind, verb, name) for kind in VERBS for verb in VERBS[kind] for name in VERBS[kind][verb] if name in SAID]


@pytest.mark.parametrize(
    ("kind", "verb", "name"), [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in WORDS]
)
async def test_what_people_say_has_a_length(kind: type, verb: str, name: str):
    """A reason or a note of 500 characters is taken; a longer one is refused by every verb, and nothing happens."""
    good = VERBS[kind][verb]
    async with a_target(kind, verb) as target:
        for text in ("x" * 501, "x" * 3_000_000):
            error = await error_of(call(target, verb, good | {name: text}))
            assert isinstance(error, InvalidInput)
            assert f"{name} must be a text of at most 500 characters, not of {len(text):,}: 'xxx" in str(error)
            assert len(str(error)) < 300
        taken = await error_of(call(target, verb, good | {name: "x" * 500}))
        assert taken is None or isinstance(taken, UnknownTask | UnknownGroup)


async def test_a_task_is_named_by_its_handle_as_well():
    """A handle, a record or an id: the verbs for one task take each, of a yard and of a queue; what has no id is
    told."""
    yard = build("memory://")
    async with yard.client():
        handle = await yard.submit("add", {"a": 1})
        assert (await yard.hold(handle)).state is TaskState.PAUSED
        assert (await yard.queue().release(await handle.record())).state is TaskState.QUEUED
        assert await yard.why(handle) == await yard.why(UUID(handle.uuid))
        assert await yard.attempts(handle) == []
        assert yard.handle(handle) == handle
        nothing: Any = yard
        with pytest.raises(InvalidInput, match="uuid must be a string"):
            await yard.hold(nothing)


@pytest.mark.parametrize(
    "wrong", [{"registry": 5}, {"order": "x"}, {"retry": 3}, {"concurrency": "2"}, {"auto_recover": -1}]
)
def test_a_queue_alone_that_makes_no_sense_is_refused(wrong: dict[str, Any]):
    """What a queue alone is made of is checked as that of a yard's queue is."""
    with pytest.raises(InvalidInput):
        StandaloneQueue(**{"registry": TaskConsumerRegistry(), **wrong})
