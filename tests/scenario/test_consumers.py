"""Functions and classes as consumers of a yard, on memory and on a file."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, SecretStr, computed_field

from taskyard import BaseTaskConsumer, InvalidInput, Task, TaskFailed, TaskHandle, TaskState, Yard, current_run
from taskyard.errors import DuplicateConsumer, InvalidArguments, InvalidConsumer
from tests.scenario.jobs import build


class Box(BaseModel):
    width: int
    label: str = "box"


class Renamed(BaseModel):
    user_id: int = Field(alias="userId")


class Computed(BaseModel, extra="forbid"):
    width: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.width**2


class Login(BaseModel):
    user: str
    password: SecretStr


class OneWay(BaseModel):
    ratio: float


class Opaque:
    """Equal only to itself, and written as the text it holds."""

    def __init__(self, text: str) -> None:
        self.text = text


OpaqueArgument = Annotated[
    Opaque,
    PlainValidator(lambda value: value if isinstance(value, Opaque) else Opaque(value)),
    PlainSerializer(lambda value: value.text),
]


@pytest.mark.spec("SCH-01")
async def test_functions_of_both_kinds_are_consumers(url):
    """An async function runs on the loop and a plain one in a thread; both take and return plain values."""
    yard = Yard(url)
    threads: dict[str, bool] = {}

    @yard.consumer
    async def swift(a: int, *, b: int = 10) -> int:
        threads["swift"] = threading.current_thread() is threading.main_thread()
        return a + b

    @yard.consumer(concurrency=2, timeout_s=5)
    def steady(words: list[str]) -> dict[str, int]:
        threads["steady"] = threading.current_thread() is threading.main_thread()
        return {word: len(word) for word in words}

    async with yard:
        one, two, three = await swift.submit(1), await swift.submit(a=2, b=3), await steady.submit(["a", "yard"])
        assert await one.result(timeout_s=10) == 11
        assert await two.result(timeout_s=10) == 5
        assert await three.result(timeout_s=10) == {"a": 1, "yard": 4}
    assert threads == {"swift": True, "steady": False}


@pytest.mark.spec("SCH-01")
async def test_a_class_is_a_consumer(url):
    """An instance of the class form works beside functions; produce decides what is stored, and when it is due."""
    yard = Yard(url)

    class Report(BaseTaskConsumer):
        name, concurrent_count = "report", 2

        def produce(self, args: dict[str, Any]) -> Task:
            later = datetime.now(UTC) + timedelta(hours=1) if args["month"] == "next" else datetime.now(UTC)
            return Task(source=self.name, args={"title": args["month"].upper()}, schedule_at=later)

        async def consume(self, task: Task) -> str:
            assert task.uuid == current_run().uuid
            return str(task.args["title"])

    yard.register(Report())
    async with yard:
        done = await yard.submit("report", {"month": "may"})
        assert await done.result(timeout_s=10) == "MAY"
        waiting = await yard.submit("report", {"month": "next"})
        assert await waiting.state() is TaskState.SCHEDULED
        overruled = await yard.submit("report", {"month": "next"}, delay_s=0)
        assert await overruled.result(timeout_s=10) == "NEXT"


@pytest.mark.spec("SCH-01")
def test_concurrent_count_is_another_name_for_concurrency():
    """The name of the source design is taken wherever `concurrency` is, but not beside it."""
    yard = Yard("memory://")

    class Report(BaseTaskConsumer):
        name, concurrency = "report", 2

        async def consume(self, task: Task) -> None: ...

    def nothing() -> None: ...

    yard.register(Report())
    yard.consumer(name="fetch", concurrent_count=3)(nothing)
    assert [yard._get_consumer(name).concurrency for name in ("report", "fetch")] == [2, 3]
    with pytest.raises(InvalidConsumer, match="leave one of them out"):
        yard.consumer(name="both", concurrency=1, concurrent_count=1)(nothing)


@pytest.mark.spec("SCH-01")
async def test_a_class_may_consume_in_a_thread(url):
    """A class whose consume is a plain method runs in a thread."""
    yard = Yard(url)

    class Zip(BaseTaskConsumer):
        name = "zip"

        def consume(self, task: Task) -> bool:  # type: ignore[override]
            return threading.current_thread() is threading.main_thread()

    yard.register(Zip())
    async with yard:
        assert await (await yard.submit("zip")).result(timeout_s=10) is False


async def test_arguments_keep_their_types(url):
    """Arguments are stored as JSON and arrive as the types the function names: dates, paths, models."""
    yard = Yard(url)

    @yard.consumer
    async def describe(at: datetime, path: Path, box: Box, extra: tuple[int, ...] = ()) -> list[str]:
        return [type(value).__name__ for value in (at, path, box, extra)] + [f"{box.label} {box.width}"]

    async with yard:
        handle = await describe.submit(at=datetime.now(UTC), path=Path("a/b"), box=Box(width=3), extra=(1, 2))
        assert await handle.result(timeout_s=10) == ["datetime", Path("a").__class__.__name__, "Box", "tuple", "box 3"]
        by_name = await yard.submit("describe", {"at": "2030-01-01T00:00:00Z", "path": "x", "box": {"width": "4"}})
        assert (await by_name.result(timeout_s=10))[-1] == "box 4"


async def test_models_arrive_as_they_were_given(url):
    """Fields with other names, computed fields and types without equality survive being stored."""
    yard = Yard(url)

    @yard.consumer
    async def models(renamed: Renamed, computed: Computed, opaque: OpaqueArgument) -> list[Any]:
        return [renamed.user_id, computed.area, opaque.text]

    async with yard:
        handle = await models.submit(Renamed(userId=7), Computed(width=3), Opaque("inside"))
        assert await handle.result(timeout_s=10) == [7, 9, "inside"]


async def test_what_would_arrive_changed_is_refused(url):
    """An argument that is another value once it was stored is refused at submit, without showing it."""
    yard = Yard(url)

    @yard.consumer
    async def secret(password: SecretStr, note: str = "") -> str:
        return password.get_secret_value()

    @yard.consumer
    async def nested(login: Login) -> str:
        return login.password.get_secret_value()

    @yard.consumer
    async def one_way(value: OneWay) -> float:
        return value.ratio

    async with yard:
        with pytest.raises(InvalidArguments, match="password: it is not the same value") as refused:
            await yard.submit("secret", {"password": "hunter2"})
        assert "hunter2" not in str(refused.value)
        with pytest.raises(InvalidArguments, match="login: it is not the same value"):
            await nested.submit(Login(user="me", password=SecretStr("hunter2")))
        with pytest.raises(InvalidArguments, match=r"value.ratio: Input should be a valid number"):
            await one_way.submit(OneWay(ratio=float("nan")))
        assert await yard.store.count() == {}


async def test_a_decorated_function_is_still_a_function():
    """Called directly, a consumer runs here and now, and nothing is stored."""
    yard = Yard("memory://")

    @yard.consumer
    def double(n: int) -> int:
        """Twice as much."""
        return 2 * n

    assert double(4) == 8
    assert double.__doc__ == "Twice as much."
    async with yard:
        assert await yard.store.count() == {}


async def test_options_are_for_the_next_submits_only(url):
    """`options` gives the same consumer with other defaults, and leaves the one it was made from as it was."""
    yard = build(url)

    @yard.consumer
    async def job() -> None: ...

    urgent = job.options(priority="high", queue="fast")
    later = urgent.options(delay_s=3600)
    async with yard.client():
        plain, high, both = [await (await one.submit()).record() for one in (job, urgent, later)]
    assert (plain.priority, plain.queue, plain.state) == (1, "default", TaskState.QUEUED)
    assert (high.priority, high.queue, high.state) == (0, "fast", TaskState.QUEUED)
    assert (both.priority, both.queue, both.state) == (0, "fast", TaskState.SCHEDULED)


async def test_a_consumer_can_be_added_while_the_yard_is_open(url):
    """What waits for a consumer that nobody has starts when it is added."""
    first = build(url)
    async with first:

        @first.consumer
        async def newcomer() -> str:
            return "here"

        assert await (await newcomer.submit()).result(timeout_s=10) == "here"


BAD = [
    pytest.param(lambda yard: yard.consumer(lambda: None), "give it one with name=", id="no-name"),
    pytest.param(lambda yard: yard.consumer(positional_only), "arguments are stored by name", id="positional-only"),
    pytest.param(lambda yard: yard.consumer(variadic), "arguments are stored by name", id="variadic"),
    pytest.param(lambda yard: yard.consumer(concurrency=0)(plain), "from 1 to 1,000,000", id="no-slots"),
    pytest.param(lambda yard: yard.consumer(timeout_s=0)(plain), "more than 0", id="no-time"),
    pytest.param(
        lambda yard: yard.consumer(executor="bogus")(plain),
        "no executor='bogus'; the words are 'inline', 'thread', 'process', 'isolated'",
        id="nowhere",
    ),
    pytest.param(lambda yard: yard.consumer(executor=["inline"])(plain), "the words are", id="no-word"),
    pytest.param(lambda yard: yard.consumer(memory_limit=1 << 30), r"yard.define_pool\(", id="limit-of-its-pool"),
    pytest.param(lambda yard: yard.consumer(yielding), "is a generator", id="generator"),
    pytest.param(lambda yard: yard.consumer(swiftly_yielding), "is a generator", id="async-generator"),
]


def plain() -> None: ...


async def swift() -> None: ...


def yielding() -> Iterator[int]:
    yield 1


async def swiftly_yielding() -> AsyncIterator[int]:
    yield 1


def positional_only(a: int, /) -> None: ...


def variadic(*all_of_them: int) -> None: ...


@pytest.mark.parametrize(("make", "message"), BAD)
def test_a_function_that_cannot_be_a_consumer_is_refused(make, message):
    """What cannot work as a consumer is refused where it is defined, with a word on what to change."""
    with pytest.raises(InvalidConsumer, match=message):
        make(Yard("memory://"))


async def test_a_coroutine_that_nobody_awaits_is_no_result(url):
    """A plain function that returns a coroutine, as a careless decorator makes it, fails its task and says why."""
    yard = Yard(url)

    @yard.consumer
    def careless() -> Any:
        return swift()

    async with yard:
        with pytest.raises(TaskFailed, match=r"returned a coroutine; write it, .* as `async def`"):
            await (await careless.submit()).result(timeout_s=10)


def test_a_name_is_taken_once():
    """Two consumers of one name are an error."""
    yard = Yard("memory://")
    yard.consumer(plain)
    with pytest.raises(DuplicateConsumer, match="give one of the two another name"):
        yard.consumer(plain)


async def test_bad_positional_arguments_are_named(url):
    """Too many positional arguments, and one that is given twice, are refused before anything is stored."""
    yard = Yard(url)

    @yard.consumer
    async def pair(a: int, b: int) -> None: ...

    async with yard:
        with pytest.raises(InvalidArguments, match="takes 2 arguments, got 3"):
            await pair.submit(1, 2, 3)  # type: ignore[call-arg]
        with pytest.raises(InvalidArguments, match="a: given twice"):
            await pair.submit(1, a=2)  # type: ignore[call-arg, misc]
        assert await yard.store.count() == {}


@pytest.mark.spec("SCH-15")
async def test_a_yard_bounds_what_runs_at_once(url):
    """`max_running` bounds all that runs in one process, whatever the consumers may."""
    yard = Yard(url, max_running=3)
    at_once: list[int] = [0, 0]

    @yard.consumer(concurrency=50)
    async def work() -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.005)
        at_once[0] -= 1

    async with yard:
        handles = await work.submit_many([{}] * 30)
        await asyncio.gather(*(handle.result(timeout_s=10) for handle in handles))
    assert at_once == [0, 3]


def test_impossible_limits_are_refused():
    """A yard or a queue with no room at all is refused where it is made."""
    with pytest.raises(InvalidInput, match="from 1 to 1,000,000"):
        Yard("memory://", max_running=0)


@pytest.mark.parametrize("senseless", [0, -1, 1.5, True, "4", 10**9, float("inf")])
def test_impossible_rules_of_a_queue_are_refused(senseless):
    """What is no whole number, or none of a sensible size, is refused as a limit, and the queue is not defined."""
    yard = Yard("memory://")
    with pytest.raises(InvalidInput, match="concurrency must be a whole number from 1 to 1,000,000, or None"):
        yard.define_queue("q", concurrency=senseless)
    with pytest.raises(InvalidInput, match="per_key must be a whole number from 1"):
        yard.define_queue("q", per_key=senseless)
    with pytest.raises(InvalidInput, match="auto_recover must be a whole number from 0"):
        yard.define_queue("q", auto_recover=senseless or -1)


async def test_what_a_run_leaves_behind_submits_on_its_own(url):
    """A background task that outlives its run submits as anybody else does; it is no part of the ended run."""
    yard = build(url)
    behind: asyncio.Future[TaskHandle] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    async def follow_up() -> None:
        await ended.wait()
        behind.set_result(await yard.submit("add", {"a": 1}))

    @yard.consumer
    async def parent() -> None:
        running.append(asyncio.create_task(follow_up()))

    running: list[asyncio.Task[None]] = []
    async with yard:
        await (await parent.submit()).result(timeout_s=10)
        ended.set()
        await running[0]
        assert await (await behind).result(timeout_s=10) == 2
