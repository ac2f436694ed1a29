"""Bad input, as a table: each gets a typed error that says what to do, and nothing is stored."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime
from typing import Any

import pytest

from taskyard import BaseTaskConsumer, InvalidInput, RetryPolicy, Task, TaskFailed, TaskFilter, TaskState, Yard
from taskyard.errors import (
    BatchTooLarge,
    InvalidArguments,
    InvalidConsumer,
    NaiveDatetime,
    NotJson,
    PayloadTooLarge,
    UnknownConsumer,
)
from tests.scenario.jobs import build

NAIVE = datetime(2030, 1, 1, 12)  # noqa: DTZ001 - a time without a zone is the point
AWARE = NAIVE.replace(tzinfo=UTC)
NEVER = datetime.max.replace(tzinfo=UTC)
LONG = "x" * 5000

DEEP: Any = None
for _ in range(250):
    DEEP = [DEEP]

# --- what is submitted ------------------------------------------------------------------------------------------------

ADD = ("add", {"a": 1})

SUBMITS = [
    ("unknown-consumer", UnknownConsumer, "registered: add, echo, .*; register it", ("nobody", {}), {}),
    ("argument-missing", InvalidArguments, "a: Field required", ("add", {}), {}),
    ("argument-extra", InvalidArguments, "c: Extra inputs are not permitted", ("add", {"a": 1, "c": 2}), {}),
    ("argument-of-wrong-type", InvalidArguments, "a: Input should be a valid integer", ("add", {"a": "one"}), {}),
    ("several-at-once", InvalidArguments, "a: Field required; b: Input.*; z: Extra", ("add", {"b": None, "z": 1}), {}),
    ("arguments-no-dict", InvalidArguments, "must be a dict of names and values", ("add", [1]), {}),
    ("argument-not-json", NotJson, "use dicts with string keys, lists, strings", ("echo", {"value": object()}), {}),
    ("argument-not-text", NotJson, "cannot be written as JSON", ("echo", {"value": b"\xff\xfe"}), {}),
    ("argument-surrogate", NotJson, "cannot be written as JSON", ("echo", {"value": "\ud800"}), {}),
    ("argument-nan", InvalidArguments, "x: Input should be a finite number", ("half", {"x": float("nan")}), {}),
    ("argument-nan-inside", NotJson, "give None or a text", ("echo", {"value": [{"x": float("nan")}]}), {}),
    ("argument-too-deep", InvalidArguments, "recursion limit exceeded", ("echo", {"value": DEEP}), {}),
    ("argument-too-long", InvalidArguments, "number out of range", ("add", {"a": 10**4400}), {}),
    ("argument-too-long-inside", InvalidArguments, "number out of range", ("echo", {"value": [10**4400]}), {}),
    ("arguments-too-large", PayloadTooLarge, "write it to a file and pass the path", ("echo", {"value": LONG}), {}),
    ("naive-time", NaiveDatetime, r"write datetime\.now\(timezone\.utc\)", ADD, {"schedule_at": NAIVE}),
    ("time-as-text", InvalidInput, "must be a datetime with a time zone", ADD, {"schedule_at": "2030-01-01"}),
    ("time-never", InvalidInput, "between the years 1970 and 9000", ADD, {"schedule_at": NEVER}),
    ("two-times", InvalidInput, "give either delay_s or schedule_at", ADD, {"delay_s": 1, "schedule_at": AWARE}),
    ("delay-negative", InvalidInput, "delay_s must be between 0 and 1e9", ADD, {"delay_s": -1}),
    ("delay-nan", InvalidInput, "delay_s must be between 0 and 1e9", ADD, {"delay_s": float("nan")}),
    ("delay-as-text", InvalidInput, "delay_s must be a number of seconds", ADD, {"delay_s": "5"}),
    ("timeout-zero", InvalidInput, "leave it out for no limit", ADD, {"timeout_s": 0}),
    ("timeout-as-text", InvalidInput, "timeout_s must be a number of seconds", ADD, {"timeout_s": "1m"}),
    ("timeout-endless", InvalidInput, "leave it out for no limit", ADD, {"timeout_s": float("inf")}),
    ("timeout-huge", InvalidInput, "less than 1e9", ADD, {"timeout_s": 10**30}),
    ("timeout-longer", InvalidInput, "longer than the 5 s that 'half' allows", ("half", {"x": 1}), {"timeout_s": 5.1}),
    ("timeout-nan", InvalidInput, "leave it out for no limit", ADD, {"timeout_s": float("nan")}),
    ("unknown-option", InvalidInput, "unknown option urgent; known are priority, delay_s", ADD, {"urgent": True}),
    ("priority-unknown", InvalidInput, "'urgent' is not one of high, normal, low", ADD, {"priority": "urgent"}),
    ("priority-bool", InvalidInput, "True is not one of high, normal, low", ADD, {"priority": True}),
    ("priority-number", InvalidInput, "7 is not one of high, normal, low", ADD, {"priority": 7}),
    ("retry-as-number", InvalidInput, r"such as RetryPolicy\(max_retries=3\)", ADD, {"retry": 3}),
    ("dedupe-unknown", InvalidInput, "'maybe' is not one of .*merge", ADD, {"dedupe": "maybe"}),
    ("dedupe-key-alone", InvalidInput, "has no effect without dedupe=", ADD, {"dedupe_key": "k"}),
    ("queue-empty", InvalidInput, "queue must be a string of 1 to 200 characters", ADD, {"queue": ""}),
    ("key-too-long", InvalidInput, "key must be a string of 1 to 200 characters", ADD, {"key": "k" * 201}),
    ("key-surrogate", InvalidInput, "key must be text without lone surrogates", ADD, {"key": "a\udc80"}),
    ("queue-nul", InvalidInput, "queue must be text without NUL", ADD, {"queue": "a\0b"}),
    ("dedupe-key-surrogate", InvalidInput, "dedupe_key must be", ADD, {"dedupe": "merge", "dedupe_key": "\ud800"}),
    ("retry-surrogate", InvalidInput, "cannot be stored", ADD, {"retry": RetryPolicy(give_up_on=("\ud800",))}),
    ("key-as-number", InvalidInput, "key must be a string", ADD, {"key": 5}),
]


@pytest.mark.spec("SCH-09", "SCH-02")
@pytest.mark.parametrize(("error", "advice", "task", "options"), [pytest.param(*row[1:], id=row[0]) for row in SUBMITS])
async def test_what_cannot_be_submitted_is_refused(url, error, advice, task, options):
    """A task that could not run as asked is refused at submit, one by one and in a batch, and nothing is stored."""
    yard = build(url, max_payload_bytes=4096)

    @yard.consumer(timeout_s=5)
    async def half(x: float) -> float:
        return x / 2

    name, args = task
    async with yard:
        for _ in range(2):
            with pytest.raises(error, match=advice):
                await yard.submit(name, args, **options)
            with pytest.raises(error, match=advice):
                await yard.submit_many(name, [args], **options)
        assert await yard.store.count() == {}
        assert await (await yard.submit("add", {"a": 1})).result(timeout_s=10) == 2


class Named(BaseTaskConsumer):
    """Makes tasks with the id it is given."""

    name = "named"

    def produce(self, args: dict[str, Any]) -> Task:
        return Task(source=self.name, uuid=args["uuid"])

    async def consume(self, task: Task) -> str:
        return task.uuid


async def test_what_cannot_be_stored_harms_only_who_asks(url):
    """An id, a key or a reason that no store takes is refused alone: whoever submits beside it is served."""
    yard = build(url)
    yard.register(Named())
    async with yard:
        answers = await asyncio.gather(
            yard.submit("add", {"a": 1}),
            yard.submit("add", {"a": 1}, key="a\udc80"),
            yard.submit("named", {"uuid": "u\udc80"}),
            yard.submit("named", {"uuid": 5}),
            yard.submit("named", {"uuid": "fine"}),
            yard.cancel("u\udc80"),
            yard.cancel("fine", reason="\udc80"),
            return_exceptions=True,
        )
        refused = [isinstance(answer, InvalidInput) for answer in answers]
        assert refused == [False, True, True, True, False, True, True]
        with pytest.raises(InvalidInput, match="uuid must be text"):
            yard.handle("u\udc80")
        assert await yard.handle("fine").result(timeout_s=10) == "fine"


async def test_a_batch_has_an_upper_size(monkeypatch):
    """More than 100,000 tasks at once are refused, without reading on; nothing is stored."""
    monkeypatch.setattr("taskyard.yard.MAX_BATCH", 2500)
    async with build("memory://").client() as yard:
        with pytest.raises(BatchTooLarge, match="at most 2,500 tasks; split them"):
            await yard.submit_many("echo", ({} for _ in itertools.count()))
        assert await yard.store.count() == {}
        assert len(await yard.submit_many("echo", [{}] * 2500)) == 2500


async def test_a_large_batch_lets_others_run():
    """While a large batch is checked, other code on the loop gets its turns."""
    async with build("memory://").client() as yard:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        await yard.submit_many("echo", [{}] * 20_000)
        beside.cancel()
        assert turns >= 20


@pytest.mark.parametrize("senseless", [float("nan"), "5", True])
async def test_a_wait_that_is_no_time_is_refused(url, senseless):
    """What is no number of seconds is refused as a time to wait: a NaN among its timers would stall the event loop."""
    with pytest.raises(InvalidInput, match="grace_s must be a number of seconds, or None"):
        Yard(url, grace_s=senseless)
    async with build(url, grace_s=float("inf")) as yard:
        handle = await yard.submit("add", {"a": 1})
        with pytest.raises(InvalidInput, match="timeout_s must be a number of seconds, or None"):
            await handle.result(timeout_s=senseless)
        with pytest.raises(InvalidInput, match="grace_s must be"):
            await yard.stop(grace_s=senseless)
        assert await handle.result(timeout_s=float("inf")) == 2


async def test_a_negative_wait_is_refused(url):
    """A wait of less than nothing is refused as such, instead of having passed already."""
    async with build(url) as yard:
        handle = await yard.submit("add", {"a": 1})
        with pytest.raises(InvalidInput, match="timeout_s must not be negative, not -1"):
            await handle.result(timeout_s=-1)
        assert await handle.result(timeout_s=10) == 2


REPEATED = [
    ("echo", {}, {"key": LONG}),
    ("echo", {}, {"priority": LONG}),
    ("echo", {}, {"dedupe": LONG}),
    ("echo", {}, {LONG: 1}),
    ("echo", {LONG: 1}, {}),
    (LONG, {}, {}),
]


@pytest.mark.parametrize(("name", "args", "options"), REPEATED)
async def test_a_message_repeats_little_of_a_long_text(name, args, options):
    """However long a text is that is refused, the message is not: it repeats the beginning."""
    async with build("memory://") as yard:
        with pytest.raises(InvalidInput, match="xxx…") as refused:
            await yard.submit(name, args, **options)
        assert len(str(refused.value)) < 400


CONSUMERS = [
    pytest.param({"timeout_s": float("inf")}, "timeout_s must be more than 0 and less than 1e9", id="timeout-endless"),
    pytest.param({"timeout_s": -1}, "timeout_s must be more than 0", id="timeout-negative"),
    pytest.param({"name": "a\udc80"}, "name must be text", id="name-surrogate"),
    pytest.param({"queue": "a\0"}, "queue must be text", id="queue-nul"),
]


@pytest.mark.parametrize(("settings", "advice"), CONSUMERS)
def test_a_consumer_that_no_store_takes_is_refused(settings, advice):
    """A consumer whose name, queue or timeout cannot be stored is refused when it is made, in both forms."""
    yard = Yard("memory://")
    with pytest.raises(InvalidConsumer, match=advice):

        @yard.consumer(**{"name": "job", **settings})
        async def job() -> None: ...

    source = Named()
    for name, value in settings.items():
        setattr(source, name, value)
    with pytest.raises(InvalidConsumer, match=advice):
        yard.register(source)
    assert not yard.consumers


def nothing() -> None: ...


@pytest.mark.parametrize("count", ["x", 0, 1.5, True])
def test_a_count_that_is_none_is_refused(count):
    """A consumer's count of runs at once is a whole number; another is refused when the consumer is made."""
    with pytest.raises(InvalidConsumer, match="concurrency must be a whole number from 1"):
        Yard("memory://").consumer(concurrency=count)(nothing)


def test_a_setting_that_no_consumer_has_is_refused():
    """A misspelled setting is refused by name, with those that there are."""
    with pytest.raises(InvalidConsumer, match="has no 'bogus'; known are name, queue, concurrency"):
        Yard("memory://").consumer(bogus=1)  # type: ignore[call-overload]


YARDS = [
    pytest.param({"max_running": "x"}, "max_running must be a whole number from 1", id="max-running"),
    pytest.param({"threads": 1.5}, "threads must be a whole number from 1", id="threads"),
    pytest.param({"max_payload_bytes": -1}, "max_payload_bytes must be a whole number from 1", id="payload"),
    pytest.param({"keep_s": "x"}, "keep_s must be between 0 and 1e9 seconds, or None", id="keep"),
    pytest.param({"name": 5}, "the name of a yard must be a string of 1 to 200 characters", id="name"),
    pytest.param({"name": "\ud800"}, "the name of a yard must be text without lone surrogates", id="unwritable-name"),
    pytest.param({"store": 5}, "given as an address such as sqlite:///work.db, or as a pathlib.Path", id="store"),
    pytest.param({"store": f"sqlite:///{'x' * 300}.db"}, "longer than 240 bytes", id="long-name"),
    pytest.param({"store": "sqlite:///a\0b.db"}, "a path has no NUL characters", id="nul"),
]


@pytest.mark.parametrize(("settings", "advice"), YARDS)
def test_a_yard_that_makes_no_sense_is_refused(settings, advice):
    """A setting of a yard that is none is refused when the yard is made."""
    with pytest.raises(InvalidInput, match=advice):
        Yard(**{"store": "memory://", **settings})


POLICIES = [{"max_retries": "x"}, {"max_retries": 1.5}, {"first_s": "1"}, {"factor": None}, {"cap_s": -1}]
POLICIES += [{"retry_on": (ValueError,)}, {"give_up_on": "OSError"}, {"retry_on": 5}, {"give_up_on": ("OSError", 5)}]


@pytest.mark.parametrize("settings", POLICIES)
def test_a_policy_that_makes_no_sense_is_refused(settings):
    """A retry policy whose values are none is refused when it is made."""
    with pytest.raises(InvalidInput, match="must"):
        RetryPolicy(**settings)


TASKS = [{"source": ""}, {"source": 5}, {"uuid": 3}, {"schedule_at": "x"}]


@pytest.mark.parametrize("fields", TASKS)
def test_a_task_that_makes_no_sense_is_refused(fields):
    """A task without a source, an id or a time is refused when it is made."""
    with pytest.raises(InvalidInput, match="must be a"):
        Task(**{"source": "named", **fields})


@pytest.mark.parametrize("batch", [None, 5, {"a": 1}, "text"], ids=["none", "number", "dict", "text"])
async def test_what_is_no_batch_and_no_number_is_refused(url, batch):
    """A batch that is none, and an event number that is none, are refused with what to give instead."""
    async with build(url) as yard:
        with pytest.raises(InvalidInput, match="submit_many takes a list of dicts"):
            await yard.submit_many("add", batch)
        with pytest.raises(InvalidInput, match="after must be a whole number"):
            await anext(yard.events(after="x"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"c": 1}, {"a": "x" * 5000}, {"a": 10**5000}, 5], ids=["name", "type", "digits", "no-dict"]
)
@pytest.mark.parametrize("place", [0, 7, 1003])
async def test_the_item_of_a_batch_that_is_wrong_is_named(url, wrong, place):
    """Of many tasks that are submitted at once, the error says which is wrong; none is stored."""
    batch = [{"a": 1, "b": 2} for _ in range(1100)]
    batch[place] = wrong
    async with build(url).client() as yard:
        with pytest.raises(InvalidInput, match=f"^item {place}: ") as refused:
            await yard.submit_many("add", batch)
        assert refused.value.item == place
        assert await yard.store.count() == {}


@pytest.mark.parametrize("by", [5, None, "a\0b", "\ud800", "x" * 201])
async def test_who_asks_is_a_name(url, by):
    """A command whose asker no store could keep is refused by all of them alike, and changes nothing."""
    async with build(url).client() as yard:
        handle = await yard.submit("add", {"a": 1, "b": 2})
        with pytest.raises(InvalidInput, match="by must be"):
            await yard.hold(handle.uuid, by=by)
        with pytest.raises(InvalidInput, match="by must be"):
            await yard.matching(by=by).hold()
        assert (await handle.record()).state is TaskState.QUEUED


@pytest.mark.parametrize("field", ["queue", "consumer", "group", "key", "node", "error", "uuid"])
def test_a_filter_has_texts_that_a_store_takes(field):
    """One that none does is refused when the filter is made."""
    for text in ("\ud800", "a\0b"):
        where: dict[str, Any] = {field: text}
        with pytest.raises(InvalidInput, match=f"{field} must be text without"):
            TaskFilter(**where)


async def test_a_path_is_a_sqlite_file(tmp_path):
    """A `Path` is taken as that of a SQLite file, when the yard is made and later."""
    yard = Yard(tmp_path / "work.db")
    assert yard.where == f"sqlite:///{tmp_path}/work.db"
    async with yard:
        assert (tmp_path / "work.db").exists()
    yard.use_store(tmp_path / "other.db")
    assert yard.where == f"sqlite:///{tmp_path}/other.db"


# --- what comes back --------------------------------------------------------------------------------------------------

RESULTS = [
    pytest.param(object, "NotJson", "use dicts with string keys", id="not-json"),
    pytest.param(lambda: {1j: 2}, "NotJson", "cannot be written as JSON", id="keys-not-text"),
    pytest.param(lambda: float("nan"), "NotJson", "give None or a text in its place", id="nan"),
    pytest.param(lambda: [{"x": float("-inf")}], "NotJson", "NaN or an infinite number", id="infinite"),
    pytest.param(lambda: LONG, "PayloadTooLarge", "write it to a file and pass the path", id="too-large"),
    pytest.param(lambda: "\ud800", "NotJson", "cannot be written as JSON", id="surrogate"),
]


@pytest.mark.parametrize(("make", "error_type", "advice"), RESULTS)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_result_that_cannot_be_kept_fails_the_task(url, make, error_type, advice, is_async):
    """A result that is not JSON or too large fails the task at once, without a retry, and says what to do."""
    yard = Yard(url, max_payload_bytes=4096)
    if is_async:

        @yard.consumer(name="maker")
        async def make_async() -> Any:
            return make()

    else:
        yard.consumer(name="maker")(make)

    async with yard:
        handle = await yard.submit("maker", retry=RetryPolicy(max_retries=5, first_s=0.01))
        with pytest.raises(TaskFailed, match=advice) as failed:
            await handle.result(timeout_s=10)
        assert failed.value.error_type == error_type
        record = await handle.record()
        assert (record.state, record.attempt, record.result) == (TaskState.FAILED, 1, None)


async def test_arguments_that_no_longer_fit_fail_the_task(file_url):
    """A task that was stored for an earlier form of its function fails at once, naming what does not fit."""
    old, new = Yard(file_url), Yard(file_url)

    @old.consumer(name="job")
    async def first_form(a: int) -> int:
        return a

    @new.consumer(name="job")
    async def second_form(b: int) -> int:
        return b

    async with old.client():
        uuid = (await first_form.submit(1)).uuid
    async with new:
        with pytest.raises(TaskFailed, match=r"a: Extra inputs are not permitted|b: Field required") as failed:
            await new.handle(uuid).result(timeout_s=10)
        assert failed.value.kind == "validation"
        assert (await new.handle(uuid).record()).attempt == 1
