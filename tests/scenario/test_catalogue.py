"""The catalogue of consumers: what nodes publish, and submits that are checked by it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from taskyard import BaseTaskConsumer, InvalidInput, Task, Yard
from taskyard import catalogue as catalogue_module
from taskyard.catalogue import Catalogue, UnservedNotice
from taskyard.errors import InvalidArguments, StoreUnavailable, UnknownConsumer
from taskyard.model.catalogue import SPEC_KEPT, ConsumerSpec
from taskyard.model.json_schema import fit
from taskyard.model.task import TaskRecord
from taskyard.testing.samples import a_node, a_record
from tests.scenario.gates import PATIENCE_S, until_node


@dataclass
class Crop:
    left: int
    right: int = 10


class Legacy(BaseTaskConsumer):
    """The class form, with the inherited `produce`."""

    name = "legacy"

    async def consume(self, task: Task) -> Any:
        return task.args


class Maker(Legacy):
    """The class form, with a `produce` of its own."""

    name = "maker"

    def produce(self, args: dict[str, Any]) -> Task:
        return Task(source=self.name, args={"made": args})


@pytest.fixture(params=["sqlite", "postgres"])
def shared_url(request: pytest.FixtureRequest, file_url: str) -> str:
    """The address of an empty store that several yards can open."""
    found: str = request.getfixturevalue("postgres_url") if request.param == "postgres" else file_url
    return found


def build(url: str, **settings: Any) -> Yard:
    yard = Yard(url, **settings)

    @yard.consumer(queue="images", concurrency=2, timeout_s=60)
    async def resize(path: str, width: int = 100, crop: Crop | None = None) -> list[int]:
        return [width]

    @yard.consumer(version="7", executor="thread")
    def anything(**values: Any):
        return values

    yard.register(Legacy())
    yard.register(Maker())
    return yard


async def test_a_node_publishes_its_consumers(url):
    """Each consumer is listed with queue, executor, version, the schemas of arguments and result, and the nodes."""
    async with build(url, version="2.1", name="worker-1") as yard:
        entries = {entry.spec.name: entry for entry in await yard.catalogue()}
    assert set(entries) == {"resize", "anything", "legacy", "maker"}
    resize = entries["resize"].spec
    assert (resize.queue, resize.executor, resize.version, resize.timeout_s) == ("images", "inline", "2.1", 60)
    assert resize.args is not None
    assert list(resize.args["properties"]) == ["path", "width", "crop"]
    assert resize.args["required"] == ["path"]
    assert resize.args["properties"]["width"] == {"type": "integer", "default": 100}
    assert resize.result == {"type": "array", "items": {"type": "integer"}}
    assert entries["resize"].is_served
    assert [label.split(" ")[0] for label in entries["resize"].nodes] == ["worker-1"]
    anything = entries["anything"].spec
    assert (anything.version, anything.executor, anything.result) == ("7", "thread", None)
    assert fit(anything.args or {}, {"whatever": [1]}).misfits == []
    assert (entries["legacy"].spec.args, entries["legacy"].spec.has_produce) == (None, False)
    assert entries["maker"].spec.has_produce


class Account(BaseModel):
    """With secrets among its defaults."""

    user: str = "ann"
    password: str = "hunter2-in-a-model"
    api_key: Annotated[str, Field(examples=["hunter2-as-an-example"])] | None = None


async def test_secret_defaults_are_not_published(url):
    """A default is code, and may be a secret: that of a parameter or field with a secret name is left out, and
    passwords in other defaults are hidden. Which arguments fit stays the same."""
    yard = Yard(url)

    @yard.consumer
    async def charge(
        account: Account,
        other: Account = Account(password="hunter2-in-a-default"),  # noqa: B008
        api_key: str = "hunter2-in-a-parameter",
        token: str | None = None,
        base: str = "https://me:hunter2@example.org",
        mode: Literal["fast", "slow"] = "fast",
    ) -> Account:
        return account

    async with yard:
        (entry,) = await yard.catalogue()
    published = msgspec.json.encode(entry.spec).decode()
    assert "hunter2" not in published
    args = entry.spec.args
    assert args is not None
    properties = args["properties"]
    assert properties["api_key"] == {"type": "string"}
    assert (properties["token"]["default"], properties["mode"]["default"]) == (None, "fast")
    assert properties["base"]["default"] == "https://me:***@example.org"
    assert args["$defs"]["Account"]["properties"]["user"]["default"] == "ann"
    assert fit(args, {"account": {}, "mode": "slow"}).misfits == []


@dataclass
class Unresolved:
    other: Missing  # type: ignore[name-defined]  # noqa: F821


class Stubborn:
    """A type whose own code for schemas fails."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        raise RuntimeError("no schema")


async def test_a_type_without_a_schema_keeps_no_yard_from_opening(url):
    """A result of a type that JSON Schema cannot say is published without a schema, and its tasks run."""
    yard = Yard(url)

    @yard.consumer
    async def unresolved() -> Unresolved | None:
        return None

    @yard.consumer
    async def stubborn() -> Stubborn | None:
        return None

    async with yard:
        assert await (await unresolved.submit()).result(timeout_s=PATIENCE_S) is None
        entries = {entry.spec.name: entry.spec.result for entry in await yard.catalogue()}
    assert entries == {"unresolved": None, "stubborn": None}


async def test_consumers_that_come_and_go_are_published(url):
    """A consumer that is registered while the yard is open is in the catalogue, and one that is unregistered is served
    no more."""
    async with build(url) as yard:

        @yard.consumer
        async def late(n: int) -> None: ...

        await until_node(yard, serves="late")
        (entry,) = (await yard.catalogue()).get("late")
        assert entry.is_served
        assert entry.spec.args == schema("n", "integer")
        yard.unregister("late")
        await until_node(yard, lacks="late")
        (entry,) = (await yard.catalogue()).get("late")
        assert not entry.is_served


async def test_a_submit_is_checked_without_the_code(shared_url):
    """A process without the code submits by the catalogue: on the queue and with the timeout of the consumer, text
    converted, and what does not fit refused by its name."""
    async with build(shared_url) as worker, Yard(shared_url).client() as client:
        catalogue = await client.catalogue()
        resize = catalogue.stand_in("resize")
        handle = await client.submit_to(resize, {"path": "a.png", "width": "20"})
        assert await handle.result(timeout_s=10) == [20]
        record = await handle.record()
        assert (record.queue, msgspec.json.decode(record.args)) == ("images", {"path": "a.png", "width": 20})
        assert await handle.is_served()
        for args, problem in (
            ({}, "path: is missing"),
            ({"path": "a", "hight": 1}, "hight: is unknown; known are: path, width, crop"),
            ({"path": "a", "width": "wide"}, "width: must be an integer, not 'wide'"),
            ({"path": "a", "crop": {"left": "x"}}, "crop.left: must be an integer"),
        ):
            with pytest.raises(InvalidArguments, match=problem):
                await client.submit_to(resize, args)
        with pytest.raises(InvalidInput, match="longer than the 60 s"):
            await client.submit_to(resize, {"path": "a"}, timeout_s=100)
        with pytest.raises(UnknownConsumer, match="registered: anything, legacy, maker, resize"):
            catalogue.stand_in("risize")
        with pytest.raises(InvalidInput, match="made by the method `produce`"):
            catalogue.stand_in("maker")
        assert worker.consumers.keys() == {"resize", "anything", "legacy", "maker"}


async def test_the_catalogue_outlives_the_workers(shared_url):
    """While the workers are down, arguments are still checked by what they published last, and nobody seems to serve
    the consumer."""
    async with build(shared_url):
        pass
    async with Yard(shared_url).client() as client:
        catalogue = await client.catalogue()
        assert not catalogue.is_served("resize")
        handle = await client.submit_to(catalogue.stand_in("resize"), {"path": "a.png"})
        assert not await handle.is_served()
        with pytest.raises(InvalidArguments, match="path: is missing"):
            catalogue.check("resize", {})
    assert SPEC_KEPT.days == 7


async def test_during_a_rollout_either_version_is_taken(url):
    """Arguments have to fit one of the versions that are served; the message is that of the latest."""
    old = ConsumerSpec(name="send", version="1", args=schema("to"))
    new = ConsumerSpec(name="send", version="2", args=schema("address"))
    async with Yard(url).client() as yard:
        for name, spec in (("a", old), ("b", new)):
            node = msgspec.structs.replace(a_node(name), consumers=("send",), specs={"send": spec.hash})
            await yard.store.join(node, [spec])
        catalogue = await yard.catalogue()
        assert {entry.spec.version for entry in catalogue.get("send")} == {"1", "2"}
        assert catalogue.check("send", {"to": "x"}) == {"to": "x"}
        assert catalogue.check("send", {"address": "x"}) == {"address": "x"}
        with pytest.raises(InvalidArguments):
            catalogue.check("send", {"phone": "x"})
        await yard.store.drain("incarnation-b")
        assert (await yard.catalogue()).get("send")[0].spec.version == "1"
        with pytest.raises(InvalidArguments):
            (await yard.catalogue()).check("send", {"address": "x"})
        for name in "ab":
            await yard.store.leave(f"incarnation-{name}")


def schema(name: str, kind: str = "string") -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind}},
        "required": [name],
        "additionalProperties": False,
    }


async def test_a_client_says_once_that_nothing_serves_a_consumer(shared_url, monkeypatch, caplog):
    """A process without workers logs a warning if no live node has the consumer that it submits to: once per consumer,
    and not if a node serves it."""
    monkeypatch.setattr(catalogue_module, "NOTICE_S", 0.0)
    looks: asyncio.Queue[None] = asyncio.Queue()
    look = UnservedNotice._look

    async def watched(notice: UnservedNotice) -> None:
        await look(notice)
        looks.put_nowait(None)

    monkeypatch.setattr(UnservedNotice, "_look", watched)
    with caplog.at_level(logging.WARNING, "taskyard"):
        async with asyncio.timeout(PATIENCE_S), build(shared_url).client() as client:
            await client.submit("resize", {"path": "a"})
            await client.submit_many("resize", [{"path": "a"}])
            await looks.get()
            await client.submit("resize", {"path": "a"})
            await client.submit("legacy", {})
            await looks.get()
        unserved = [record.args for record in caplog.records if "no live node serves" in record.message]
        assert unserved == [("resize",), ("legacy",)]
        caplog.clear()
        async with asyncio.timeout(PATIENCE_S), build(shared_url), build(shared_url).client() as client:
            await client.submit("resize", {"path": "a"})
            await looks.get()
        assert not caplog.records


def unserved(caplog: pytest.LogCaptureFixture) -> list[object]:
    """The consumers that nothing serves, as the log names them."""
    return [record.args for record in caplog.records if "no live node serves" in record.message]


async def test_a_short_script_is_told_when_it_ends(shared_url, caplog):
    """A process that ends before it has looked looks as it closes: after a submit, a group, running a task again, and
    running a schedule by hand; not if a node serves the consumer."""
    async with build(shared_url) as worker:
        old = await worker.submit("resize", {"path": "a"})
        await old.result(timeout_s=PATIENCE_S)
        async with build(shared_url).client() as client:
            await client.submit("resize", {"path": "a"})
        assert unserved(caplog) == []
    async with build(shared_url).client() as client:
        await client.submit_group([client.bind("resize", {"path": "a"}), client.bind("anything")])
    assert sorted(unserved(caplog), key=str) == [("anything",), ("resize",)]
    caplog.clear()
    async with build(shared_url).client() as client:
        await client.run_again(old)
    assert unserved(caplog) == [("resize",)]
    caplog.clear()
    async with build(shared_url).client() as client:
        await client.run_all_again(repeat=True)
    assert unserved(caplog) == [("resize",)]
    caplog.clear()
    async with build(shared_url).client() as client:
        await client.schedules.add("hourly", "0 * * * *", "resize", {"path": "a"})
        await client.schedules.run_now("hourly")
    assert unserved(caplog) == [("resize",)]


def noting(*consumers: str) -> list[TaskRecord]:
    return [a_record(consumer=consumer) for consumer in consumers]


async def test_a_slow_store_is_looked_at_once_at_a_time(monkeypatch, caplog):
    """A second look waits for the first; none is lost, and closing waits for the store no longer than a second."""
    monkeypatch.setattr(catalogue_module, "NOTICE_S", 0.0)
    may_answer, asked = asyncio.Event(), asyncio.Queue[None]()

    async def read() -> Catalogue:
        asked.put_nowait(None)
        await may_answer.wait()
        return Catalogue(())

    notice = UnservedNotice(read)
    async with asyncio.timeout(PATIENCE_S):
        notice.note(noting("resize"))
        await asked.get()
        notice.note(noting("legacy", "resize"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert asked.empty(), "the first look has not ended"
        may_answer.set()
        await asked.get()
        await notice.close()
        assert unserved(caplog) == [("resize",), ("legacy",)]
        may_answer.clear()
        monkeypatch.setattr(catalogue_module, "CLOSE_S", 0.01)
        notice.note(noting("resize"))
        await notice.close()
    assert unserved(caplog) == [("resize",), ("legacy",)]


async def test_a_look_that_fails_is_logged(caplog):
    """An error of the look reaches the log, not the caller. A store that is away is asked again at the end."""
    errors: list[Exception] = [StoreUnavailable("away"), ZeroDivisionError("broken")]

    async def read() -> Catalogue:
        raise errors.pop(0)

    notice = UnservedNotice(read)
    notice.note(noting("resize"))
    await notice._look()
    assert caplog.records == []
    await notice.close()
    (record,) = caplog.records
    assert "cannot tell whether the consumers resize are served" in record.message
    assert record.exc_info is not None
