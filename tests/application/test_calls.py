"""The local application on a real yard: what a call takes and returns survives JSON, and commands keep their actor."""

import asyncio
import typing
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from taskyard import Yard
from taskyard.application.command_requests import (
    Cancel,
    Hold,
    MoveAfter,
    Pause,
    QueueCommand,
    Retry,
    SetConcurrency,
    SetPriority,
    StartNow,
    TaskCommand,
    task_command,
)
from taskyard.application.errors import (
    AmbiguousTask,
    AppRequired,
    InvalidRef,
    NoSuchConsumer,
    StoreMissing,
    StoreNotShared,
    UnknownQueue,
    WaitTimeout,
    describe_error,
)
from taskyard.application.local import LocalApplication
from taskyard.application.opening import open_application
from taskyard.application.queues import queue_document
from taskyard.application.schedule_documents import ScheduleRequest
from taskyard.application.task_requests import BulkReport, SubmitRequest
from taskyard.errors import InvalidArguments, InvalidInput, OutcomeUnknown, StoreUnavailable, UnknownConsumer
from taskyard.model.event import EventFilter
from taskyard.model.order import Priority
from taskyard.model.queue import UNTOUCHED, QueueControl, QueueSettings, QueueStatus
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.queueing import matching

T = TypeVar("T")
ANA = "web:ana"


def through_json(value: T) -> T:
    """The value as a client on the other side of HTTP has it."""
    return msgspec.json.decode(msgspec.json.encode(value), type=type(value))


def make_yard(path: Path) -> Yard:
    yard = Yard(path / "work.db")

    @yard.consumer
    async def add(a: int, b: int = 0, token: str = "") -> int:
        return a + b

    @yard.consumer
    async def fail(why: str) -> None:
        raise ValueError(why)

    return yard


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[LocalApplication]:
    """On a yard that only submits: no task runs."""
    async with open_application(make_yard(tmp_path), actor=ANA, create=True) as opened:
        yield opened


@pytest.fixture
async def working(tmp_path: Path) -> AsyncIterator[LocalApplication]:
    """On a yard that runs its tasks."""
    async with make_yard(tmp_path) as yard, open_application(yard, actor=ANA) as opened:
        yield opened


async def submit(application: LocalApplication, count: int = 1, **options: Any) -> list[str]:
    requests = [SubmitRequest(consumer="add", args={"a": n}, **options) for n in range(count)]
    return [(await application.tasks.submit(request)).uuid for request in requests]


# --- values -----------------------------------------------------------------------------------------------------------


async def test_documents_survive_json(working: LocalApplication) -> None:
    """A client that decodes a document has the same document."""
    tasks = working.tasks
    receipt = await tasks.submit(SubmitRequest(consumer="add", args={"a": 1, "token": "xyzzy"}, priority="high"))
    done = await tasks.wait(receipt.uuid, timeout_s=30)
    failed = (await tasks.submit(SubmitRequest(consumer="fail", args={"why": "bad luck"}))).uuid
    with pytest.raises(Exception, match="bad luck"):
        await tasks.wait(failed, timeout_s=30)
    request = ScheduleRequest(name="hourly", rule="0 * * * *", zone="Europe/Berlin", consumer="add", args={"a": 1})
    documents = [
        receipt, done, await tasks.get(failed), await tasks.list(), await tasks.failures(), await tasks.get_log(failed),
        await working.queues.order("default", concurrency=2), await tasks.explain_all(),
        *await tasks.explain(failed), *await tasks.apply([receipt.uuid], Retry()), *await working.queues.list(),
        await working.schedules.put(request), await working.schedules.get("hourly"), request,
        await tasks.prune(finished_before=datetime.now(UTC) - timedelta(days=1), dry_run=True),
    ]  # fmt: skip
    assert [through_json(document) for document in documents] == documents
    assert (done.result, done.args) == (1, {"a": 1, "token": "***"})


COMMANDS = [
    pytest.param(b'{"type":"cancel","reason":"not needed"}', Cancel(reason="not needed"), id="cancel"),
    pytest.param(b'{"type":"set_priority","priority":"low"}', SetPriority(priority="low"), id="priority"),
    pytest.param(b'{"type":"move_after","other":"3f259cf1"}', MoveAfter(other="3f259cf1"), id="move"),
]


@pytest.mark.parametrize(("text", "command"), COMMANDS)
def test_a_command_is_read_from_json(text: bytes, command: TaskCommand) -> None:
    """The type of a command is told by its tag."""
    assert msgspec.json.decode(text, type=TaskCommand) == command


def test_a_request_with_an_unknown_field_is_refused() -> None:
    """A misspelt option must not be taken for one that was left out."""
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"consumer":"add","prioritty":"high"}', type=SubmitRequest)


UNKNOWN = [
    pytest.param(b'{"type":"cancel","forse":true}', TaskCommand, id="a-misspelt-field"),
    pytest.param(b'{"type":"cancel","code":"timeout"}', TaskCommand, id="a-code-of-the-engine"),
    pytest.param(b'{"type":"cancel","subject":"nightly"}', TaskCommand, id="a-subject-of-the-engine"),
    pytest.param(b'{"type":"release","reason":"done"}', TaskCommand, id="a-command-without-a-reason"),
    pytest.param(b'{"type":"pause","reson":"backup"}', QueueCommand, id="a-queue-command"),
    pytest.param(b'{"type":"set_concurrency","concurrency":1,"limit":2}', QueueCommand, id="a-limit"),
    pytest.param(b'{"quue":"cpu"}', TaskFilter, id="a-task-filter"),
    pytest.param(b'{"kind":["failed"]}', EventFilter, id="an-event-filter"),
]


@pytest.mark.parametrize(("text", "kind"), UNKNOWN)
def test_an_unknown_field_of_a_command_or_filter_is_refused(text: bytes, kind: Any) -> None:
    """A client cannot write what only the engine says, and a misspelt filter does not match everything."""
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text, type=kind)


@pytest.mark.parametrize("command", typing.get_args(TaskCommand))
def test_every_command_on_a_task_becomes_one_of_the_model(command: type[TaskCommand]) -> None:
    """With the values of the request."""
    given: dict[str, Any] = {
        "reason": "r", "force": True, "to_head": False, "priority": "low", "urgent": True, "other": "3f259cf1",
        "due_at": datetime.now(UTC),
    }  # fmt: skip
    values = {name: given[name] for name in command.__struct_fields__}
    stored = task_command(command(**values))
    expected = {**values, "priority": Priority.LOW} if "priority" in values else values
    assert type(stored).__name__ == command.__name__
    assert {name: getattr(stored, name) for name in values} == expected


def test_a_reason_has_the_length_that_it_has_everywhere() -> None:
    """A reason is shown in lists and kept in events."""
    with pytest.raises(InvalidInput, match="at most"):
        Cancel(reason="x" * 100_000)


# --- queues in their order, and why many wait -------------------------------------------------------------------------


@pytest.mark.spec("QUE-32")
async def test_a_command_that_moves_answers_with_the_place(application: LocalApplication) -> None:
    """Tasks that are moved by one command have the places that they have when all of them are moved."""
    first, second, third = await submit(application, 3)
    receipts = await application.tasks.apply([third, second], StartNow())
    found = [(one.place.place, one.place.waiting, one.place.queue) for one in receipts if one.place is not None]
    assert found == [(2, 3, "default"), (1, 3, "default")]
    (low,) = await application.tasks.apply([second], SetPriority(priority="low"))
    assert low.place is not None
    assert (low.place.place, low.place.priority) == (3, "low")
    (held,) = await application.tasks.apply([first], Hold())
    assert held.place is None


@pytest.mark.spec("QUE-32")
async def test_a_title_in_a_queue_hides_secrets(application: LocalApplication) -> None:
    """A title that quotes a secret among the arguments is shown without it."""
    request = SubmitRequest(consumer="add", args={"a": 1, "token": "xyzzy"}, title="with xyzzy")
    await application.tasks.submit(request)
    (entry,) = (await application.queues.order("default")).waiting
    assert entry.title == "with ***"


async def test_why_many_wait_names_the_command(application: LocalApplication) -> None:
    """Each group has what to type to free it, with the app that was named; an unknown queue is told."""
    await submit(application, 2)
    summary = await application.tasks.explain_all(TaskFilter(queue="default"))
    assert [(group.count, group.command) for group in summary.groups] == [(2, "taskyard worker module:yard")]
    await application.queues.apply("default", Pause())
    (group,) = (await application.tasks.explain_all()).groups
    assert (group.command, group.subject) == ("taskyard queue resume default", "default")
    assert "nowhere" in (await application.tasks.explain_all(TaskFilter(queue="nowhere"))).no_match
    with pytest.raises(UnknownQueue):
        await application.queues.order("nowhere")


# --- submitting -------------------------------------------------------------------------------------------------------


async def test_a_submit_keeps_its_actor_and_options(application: LocalApplication) -> None:
    """The actor is the one that the application was opened for; refs of dependencies are resolved."""
    (first,) = await submit(application)
    request = SubmitRequest(consumer="add", args={"a": 2}, after=(first[-8:],), title="second", labels={"of": "ana"})
    receipt = await application.tasks.submit(request)
    assert (receipt.state, receipt.title, receipt.labels) == (TaskState.BLOCKED, "second", {"of": "ana"})
    assert (receipt.submitted_by, receipt.is_new, receipt.is_checked, receipt.is_served) == (ANA, True, True, False)


async def test_an_argument_is_taken_as_the_text_that_was_typed(application: LocalApplication) -> None:
    """Where a consumer wants a string, a number that was typed is one; what fits neither way is refused."""
    request = SubmitRequest(consumer="fail", args={"why": 2030}, args_text={"why": "2030"})
    assert (await application.tasks.submit(request)).args == {"why": "2030"}
    with pytest.raises(InvalidArguments):
        await application.tasks.submit(SubmitRequest(consumer="add", args={"a": "x"}, args_text={}))
    assert (await application.tasks.list()).counts == {TaskState.QUEUED: 1}


async def test_without_its_code_a_consumer_is_known_by_its_nodes(working: LocalApplication, tmp_path: Path) -> None:
    """A process without the app submits to what a node serves, checked by what the node has published."""
    bare = Yard(tmp_path / "work.db")
    async with open_application(bare, actor=ANA) as other:
        receipt = await other.tasks.submit(SubmitRequest(consumer="add", args={"a": 40, "b": 2}))
        assert (receipt.is_checked, receipt.is_served) == (True, True)
        with pytest.raises(InvalidArguments, match="a: must be an integer"):
            await other.tasks.submit(SubmitRequest(consumer="add", args={"a": "x"}))
        typed = SubmitRequest(consumer="fail", args={"why": 2030}, args_text={"why": "2030"})
        assert (await other.tasks.submit(typed)).args == {"why": "2030"}
        consumers = {one.name: one for one in await other.consumers.list()}
        assert consumers["add"].served
        assert consumers["add"].args_schema is not None
        assert (await other.tasks.wait(receipt.uuid, timeout_s=30)).result == 42
        with pytest.raises(UnknownConsumer):
            await other.tasks.submit(SubmitRequest(consumer="ad"))


async def test_without_code_or_node_the_app_is_asked_for(application: LocalApplication, tmp_path: Path) -> None:
    """The error names the parameter, so that each client says how it is given."""
    async with open_application(Yard(tmp_path / "work.db"), actor=ANA) as other:
        with pytest.raises(AppRequired) as caught:
            await other.tasks.submit(SubmitRequest(consumer="add"))
    assert caught.value.describe(lambda field: f"--{field}").endswith("name the app with --app module:yard")


async def test_a_wait_that_is_too_short_names_the_task(application: LocalApplication) -> None:
    """The task goes on, and the error carries its id."""
    (uuid,) = await submit(application)
    with pytest.raises(WaitTimeout) as caught:
        await application.tasks.wait(uuid[:13], timeout_s=0.01)
    assert describe_error(caught.value).data == {"uuid": uuid}


# --- refs and names ---------------------------------------------------------------------------------------------------


async def test_a_ref_names_one_task(application: LocalApplication) -> None:
    """An end or a beginning of an id will do, if it is long enough and names one task."""
    first, second = await submit(application, 2)
    assert await application.tasks.resolve([second[-8:], first, second]) == (second, first)
    with pytest.raises(InvalidRef, match="too short"):
        await application.tasks.get(first[-3:])
    with pytest.raises(AmbiguousTask) as caught:
        await application.tasks.get(first[:8])
    assert sorted(describe_error(caught.value).data["found"]) == sorted([first, second])


async def test_a_name_that_nothing_knows_is_refused(application: LocalApplication) -> None:
    """A command on a misspelt queue or consumer changes nothing; a list says why it is empty."""
    await submit(application)
    with pytest.raises(UnknownQueue):
        await application.queues.apply("defualt", Pause())
    with pytest.raises(NoSuchConsumer) as caught:
        await reports_of(application.tasks.apply_matching(TaskFilter(consumer="ad"), Hold()))
    assert describe_error(caught.value).code == "no_such_consumer"
    page = await application.tasks.list(TaskFilter(queue="defualt"))
    assert (page.counts, page.store_counts) == ({}, {TaskState.QUEUED: 1})
    assert "did you mean 'default'?" in page.no_match


# --- commands ---------------------------------------------------------------------------------------------------------


async def test_each_ref_has_its_receipt(application: LocalApplication) -> None:
    """A refusal is told in its place and does not stop the others."""
    first, second = await submit(application, 2)
    receipts = await application.tasks.apply([first, "ffffffff", second], Cancel(reason="not needed"))
    assert [receipt.ok for receipt in receipts] == [True, False, True]
    assert receipts[1].error is not None
    assert receipts[1].error.code == "unknown_task"
    task = receipts[0].task
    assert task is not None
    assert task.cancel is not None
    assert (task.state, task.cancel.actor, task.cancel.reason) == (TaskState.CANCELED, ANA, "not needed")


async def test_a_move_keeps_the_order_of_the_refs(application: LocalApplication) -> None:
    """Tasks that are put after another stand there in the order in which they were named."""
    first, *others = await submit(application, 4)
    assert all(receipt.ok for receipt in await application.tasks.apply(others[::-1], MoveAfter(other=first[-8:])))
    yard = application.tasks._yard
    places = [(await yard.handle(uuid).record()).position for uuid in [first, *others[::-1]]]
    assert places == sorted(places)


async def test_a_queue_command_is_kept_with_its_actor(application: LocalApplication) -> None:
    """The document says who set the state and the limit."""
    await submit(application)
    paused = await application.queues.apply("default", Pause(reason="backup"))
    assert paused.state_set is not None
    assert (paused.state, paused.state_set.actor, paused.state_set.reason) == ("paused", ANA, "backup")
    limited = await application.queues.apply("default", SetConcurrency(concurrency=3))
    assert (limited.concurrency, limited.concurrency_override, limited.code_concurrency) == (3, 3, None)


def test_the_concurrency_of_a_queue_is_the_one_that_holds() -> None:
    """That of a person goes before that of the code; the document has all three under the one word."""
    code = QueueStatus(name="cpu", settings=QueueSettings(name="cpu", concurrency=4), control=UNTOUCHED, counts={})
    person = msgspec.structs.replace(code, control=QueueControl(concurrency=2))
    found = [queue_document(status) for status in (code, person)]
    assert [(one.concurrency, one.concurrency_override, one.code_concurrency) for one in found] == [
        (4, None, 4),
        (2, 2, 4),
    ]


async def test_a_schedule_is_paused_by_the_actor(application: LocalApplication) -> None:
    """A schedule is added, paused and removed; its document says by whom."""
    made = await application.schedules.put(ScheduleRequest(name="n", rule=60, consumer="add", args={"a": 1}))
    assert (made.by, made.state, made.rule_text) == (ANA, "active", "every minute")
    paused = await application.schedules.pause("n", note="holidays")
    assert (paused.state, paused.paused_by, paused.note, paused.next) == ("paused", ANA, "holidays", ())
    tasks = (await application.schedules.run_now("n")).tasks
    assert [fire.task for fire in (await application.schedules.get("n")).fires] == list(tasks)
    assert (await application.schedules.remove("n")).from_code is False


# --- all that match ---------------------------------------------------------------------------------------------------


async def collect(reports: AsyncIterator[BulkReport], into: list[BulkReport]) -> None:
    async for report in reports:
        into.append(report)  # noqa: PERF401 - those before an error stay


async def reports_of(reports: AsyncIterator[BulkReport]) -> list[BulkReport]:
    return [report async for report in reports]


async def test_the_last_report_counts_all(application: LocalApplication) -> None:
    """A bulk command yields a final report; a dry run counts the same and changes nothing."""
    await submit(application, 5)
    where = TaskFilter(consumer="add")
    (dry,) = await reports_of(application.tasks.apply_matching(where, Hold(), dry_run=True))
    assert (dry.matched, dry.moved, dry.fitting, dry.dry_run) == (5, 0, 5, True)
    *_, last = await reports_of(application.tasks.apply_matching(where, SetPriority(priority="low")))
    assert (last.matched, last.moved, last.interrupted) == (5, 5, False)
    assert {task.priority for task in (await application.tasks.list()).tasks} == {"low"}


@pytest.mark.parametrize(("error", "uncertain"), [(StoreUnavailable("gone"), False), (OutcomeUnknown("cut"), True)])
async def test_an_error_comes_after_the_report_of_what_was_done(
    application: LocalApplication, monkeypatch: pytest.MonkeyPatch, error: Exception, uncertain: bool
) -> None:
    """The caller knows how far the command came, and whether more may have changed."""
    await submit(application, 5)
    monkeypatch.setattr(matching, "CHUNK", 2)
    change, rounds = matching.Matching._change, iter(range(9))

    async def fail_second(*args: Any) -> Any:
        if next(rounds) == 1:
            raise error
        return await change(*args)

    monkeypatch.setattr(matching.Matching, "_change", fail_second)
    found: list[BulkReport] = []
    with pytest.raises(type(error)):
        await collect(application.tasks.apply_matching(TaskFilter(), Hold()), found)
    assert (found[-1].moved, found[-1].interrupted, found[-1].is_uncertain) == (2, True, uncertain)


async def test_a_caller_that_stops_listening_stops_the_command(
    application: LocalApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk is changed after the iterator was closed."""
    await submit(application, 6)
    monkeypatch.setattr(matching, "CHUNK", 2)
    monkeypatch.setattr("taskyard.application.bulk.REPORT_EVERY_S", 0.0)
    change, asked = matching.Matching._change, asyncio.Event()

    async def wait_at_second(*args: Any) -> Any:
        if asked.is_set():
            await asyncio.Event().wait()
        asked.set()
        return await change(*args)

    monkeypatch.setattr(matching.Matching, "_change", wait_at_second)
    async with aclosing(application.tasks.apply_matching(TaskFilter(), Hold())) as reports:
        async for report in reports:
            if report.moved == 2:
                break
    assert (await application.tasks.list()).counts == {TaskState.PAUSED: 2, TaskState.QUEUED: 4}


# --- limits -----------------------------------------------------------------------------------------------------------


DAY_AGO = datetime.now(UTC) - timedelta(days=1)
LIMITED = {
    "tasks.list": lambda app, ref, n: app.tasks.list(limit=n),
    "tasks.get_log": lambda app, ref, n: app.tasks.get_log(ref, limit=n),
    "tasks.explain": lambda app, ref, n: app.tasks.explain(ref, max_chain=n),
    "tasks.explain_all": lambda app, ref, n: app.tasks.explain_all(limit=n),
    "tasks.failures": lambda app, ref, n: app.tasks.failures(limit=n),
    "tasks.get_group": lambda app, ref, n: app.tasks.get_group(ref, limit=n),
    "queues.order": lambda app, ref, n: app.queues.order("default", limit=n),
    "events.read": lambda app, ref, n: app.events.read(limit=n),
    "events.read of a tail": lambda app, ref, n: app.events.read(tail=n),
    "audit.list": lambda app, ref, n: app.audit.list(limit=n),
    "schedules.get": lambda app, ref, n: app.schedules.get("n", next_count=n),
    "schedules.backfill": lambda app, ref, n: app.schedules.backfill("n", start=DAY_AGO, end=DAY_AGO, limit=n),
}


@pytest.mark.parametrize("limit", [-5, 0, 10**9])
@pytest.mark.parametrize("call", LIMITED)
async def test_a_limit_is_checked_before_anything_is_read(application: LocalApplication, call: str, limit: int) -> None:
    """A limit of none, fewer or very many is refused by each call that has one; 0 next fire times are allowed."""
    (ref,) = await submit(application)
    await application.schedules.put(ScheduleRequest(name="n", rule=60, consumer="add", args={"a": 1}))
    if (call, limit) == ("schedules.get", 0):
        assert (await application.schedules.get("n", next_count=0)).next == ()
        return
    with pytest.raises(InvalidInput, match=r"must be a whole number from 1 to 10?,000") as caught:
        await LIMITED[call](application, ref, limit)
    assert caught.value.field in ("limit", "max_chain", "tail", "next_count")


# --- opening ----------------------------------------------------------------------------------------------------------


async def test_a_store_in_memory_is_shared_with_nobody() -> None:
    """An application on a memory store that is not open would find it empty; on an open yard it works."""
    yard = Yard("memory://")
    with pytest.raises(StoreNotShared):
        async with open_application(yard, actor=ANA):
            pass
    async with yard, open_application(yard, actor=ANA) as application:
        assert (await application.tasks.list()).tasks == ()
        assert yard.is_open
    assert not yard.is_open


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A call that only looks says that the store is missing."""
    from taskyard.application.opening import find_yard

    with pytest.raises(StoreMissing):
        find_yard(f"sqlite:///{tmp_path / 'none.db'}", None)
    assert list(tmp_path.iterdir()) == []
