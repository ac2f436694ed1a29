"""Places, requirements and admission checks, as a user meets them."""

import asyncio
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from taskyard import (
    Admission,
    AlgorithmContext,
    AlgorithmSpec,
    BaseTaskConsumer,
    Blocker,
    InvalidInput,
    Place,
    Reason,
    Task,
    TaskFilter,
    TaskRecord,
    TaskState,
    Yard,
    current_run,
)
from taskyard.errors import InvalidConsumer
from taskyard.ports.places import Places
from taskyard.queueing.capacity import Slots
from tests.scenario.placed import meet, train

A100, T4 = Place("gpu-0", {"model": "a100"}), Place("gpu-1", {"model": "t4"})


class LockFiles:
    """A task that requires a file is blocked while another program's lock file lies beside it."""

    def __init__(self) -> None:
        self.kinds: Collection[str] = ("file_lock",)
        self._connected: list[Callable[[str, str], None]] = []

    async def check(self, record: TaskRecord) -> Blocker | None:
        path = record.requirements.get("file_lock")
        return Blocker("file_lock", path) if path is not None and Path(f"{path}.lock").exists() else None

    def connect(self, freed: Callable[[str, str], None]) -> Callable[[], None]:
        self._connected.append(freed)
        return lambda: self._connected.remove(freed)

    def freed(self, path: str) -> None:
        for freed in self._connected:
            freed("file_lock", path)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def url(request, tmp_path):
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/work.db"
    return request.getfixturevalue("postgres_url")


async def until(yard: Yard, uuid: str, state: TaskState) -> TaskRecord:
    """The record, once the task is in this state."""
    async with asyncio.timeout(30):
        while True:
            record = await yard.handle(uuid).record()
            if record.state is state:
                return record
            await asyncio.sleep(0.02)


async def test_worker_processes_know_their_place(url):
    """A run in a worker process is told its place; the attempt keeps it; two places run two tasks at a time."""
    yard = Yard(url)
    yard.define_pool(max_workers=2)
    yard.consumer(executor="process", places=[A100, T4])(train)
    async with yard:
        fits = await yard.submit("train", {"name": "fits"}, requires={"model": "t4"})
        name, place, pid = await fits.result(timeout_s=60)
        assert (name, place) == ("fits", "gpu-1")
        assert pid != os.getpid()
        assert [attempt.device for attempt in await yard.attempts(fits)] == ["gpu-1"]
        places: set[str] = set()
        for _ in range(20):  # on a busy machine one place may be done with its task before the other begins
            tasks = await yard.submit_many("train", [{"name": str(n)} for n in range(6)])
            places |= {(await task.result(timeout_s=60))[1] for task in tasks}
            if len(places) == 2:
                break
        assert places == {"gpu-0", "gpu-1"}


async def test_an_isolated_consumer_has_a_worker_for_each_place(tmp_path):
    """What shows as running at a place does not wait for a worker."""
    yard = Yard("memory://")
    yard.consumer(executor="isolated", places=["a", "b"])(meet)
    async with yard:
        tasks = await yard.submit_many("meet", [{"folder": str(tmp_path), "name": str(n)} for n in range(2)])
        assert {await task.result(timeout_s=60) for task in tasks} == {"a", "b"}


class Press(BaseTaskConsumer):
    name, places = "press", ("left", "right")

    async def consume(self, task: Task) -> str | None:
        return current_run().device


def press_twice(given: dict[str, int], context: AlgorithmContext) -> int:
    return 2 * given["value"]


async def test_every_form_of_consumer_may_have_places():
    """The class form has an attribute, an algorithm gets them as it is installed."""
    yard = Yard("memory://")
    yard.register(Press())
    yard.install(press_twice, spec=AlgorithmSpec("press_twice", "1.0"), places=["gpu-0"])
    async with yard:
        assert await (await yard.submit("press")).result(timeout_s=60) in Press.places
        task = await yard.submit("press_twice", {"value": 2})
        assert await task.result(timeout_s=60) == 4
        assert [attempt.device for attempt in await yard.attempts(task)] == ["gpu-0"]


async def test_a_task_goes_to_the_node_that_has_its_place(tmp_path):
    """Of two nodes on one store each serves what its own places fit."""
    url = f"sqlite:///{tmp_path}/work.db"
    yards = [Yard(url, name=place.name) for place in (A100, T4)]
    for yard, place in zip(yards, (A100, T4), strict=True):

        @yard.consumer(places=[place])
        async def where() -> str | None:
            return current_run().device

    async with yards[0], yards[1]:
        for model, name in (("t4", "gpu-1"), ("a100", "gpu-0"), ("t4", "gpu-1")):
            task = await yards[0].submit("where", requires={"model": model})
            assert await task.result(timeout_s=60) == name
        lost = await yards[1].submit("where", requires={"model": "h100"})
        why = await yards[0].why(lost)
        assert why is not None
        assert (why.reason, why.text) == (Reason.NO_PLACE, "no node has a place for 'where' with model=h100")


async def test_a_blocked_task_outlives_its_node(url, tmp_path):
    """It is blocked after a restart as well, and runs by itself when what it waits for is gone."""
    movie = tmp_path / "a.mp4"
    lock = tmp_path / "a.mp4.lock"
    lock.touch()
    locks = LockFiles()

    def make() -> Yard:
        yard = Yard(url, admission=[locks])

        @yard.consumer(concurrency=4)
        async def shrink(path: str) -> str:
            return f"shrunk {Path(path).name}"

        return yard

    async with make() as yard:
        blocked = await yard.submit("shrink", {"path": str(movie)}, requires={"file_lock": str(movie)})
        other = await yard.submit("shrink", {"path": "b.mp4"})
        assert await other.result(timeout_s=60) == "shrunk b.mp4"
        record = await until(yard, blocked.uuid, TaskState.BLOCKED)
        assert record.blocker is not None
        assert (record.blocker.kind, record.blocker.detail) == ("file_lock", str(movie))
        why = await yard.why(blocked)
        assert why is not None
        assert why.text == f"it waits for file lock {movie}"
        assert [task.uuid for task in await yard.store.list_tasks(TaskFilter(blocker="file_lock"))] == [blocked.uuid]
        if url == "memory://":
            lock.unlink()
            locks.freed(str(movie))
            assert await blocked.result(timeout_s=60) == "shrunk a.mp4"
            return
    lock.unlink()
    async with make() as yard:
        assert await yard.handle(blocked.uuid).result(timeout_s=60) == "shrunk a.mp4"
        assert [attempt.attempt for attempt in await yard.attempts(blocked.uuid)] == [1]


async def test_a_task_that_is_run_again_requires_the_same():
    """So do its title and its labels come along."""
    yard = Yard("memory://")

    @yard.consumer(places=[A100, T4])
    async def where(n: int = 0) -> str | None:
        return current_run().device

    async with yard:
        options: dict[str, Any] = {"title": "first", "labels": {"customer": "42"}, "requires": {"model": "t4"}}
        first = await yard.submit("where", **options)
        assert await first.result(timeout_s=60) == "gpu-1"
        for again in (await yard.run_again(first), await yard.run_again(first, {"n": 1})):
            assert await again.result(timeout_s=60) == "gpu-1"
            record = await again.record()
            assert (record.title, record.labels, record.requirements) == tuple(options.values())


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"places": "gpu-0"}, "places must be a list of places or names, not 'gpu-0'"),
        ({"places": [7]}, "a place must be a Place or the name of one, not 7"),
        ({"places": [Place("gpu-0", {"a b": "c"})]}, "must have names of 1 to 40 letters"),
        ({"places": [A100], "concurrency": 2}, "has places: leave concurrency out"),
        ({"places": ["gpu-0", A100]}, "two places have one name"),
    ],
)
def test_places_that_are_none_are_refused(settings, text):
    """A consumer says what is wrong with its places when it is defined."""
    with pytest.raises(InvalidConsumer, match=text):
        Yard("memory://").consumer(name="train", **settings)(train)


@pytest.mark.parametrize(
    ("requires", "text"),
    [
        ("t4", "requires must be a dict"),
        ({"model": 4}, "label model must be a string"),
        ({"": "a"}, "must have names of 1 to 40 letters"),
    ],
)
async def test_requirements_that_are_none_are_refused(requires, text):
    """A submit says what is wrong, and stores nothing."""
    yard = Yard("memory://")
    yard.consumer(places=[A100])(train)
    async with yard:
        with pytest.raises(InvalidInput, match=text):
            await yard.submit("train", {"name": "a"}, requires=requires)
        assert await yard.store.count() == {}


@pytest.mark.parametrize("check", [object(), LockFiles, "disk"])
def test_a_check_that_is_none_is_refused(check):
    """A yard says what an admission check needs."""
    with pytest.raises(InvalidInput, match="admission"):
        Yard("memory://", admission=[check] if check != "disk" else 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (("file lock:",), "lower-case word"),
        ("disk", "kinds must be a tuple of words"),
        ((), "kinds must be a tuple of words"),
        (("dependency",), "is Taskyard's own"),
    ],
)
def test_kinds_are_plain_words(kinds, text):
    """The kinds of a check are words without colons and spaces, and none that Taskyard uses itself."""
    check = LockFiles()
    check.kinds = kinds
    with pytest.raises(InvalidInput, match=text):
        Yard("memory://", admission=[check])


def test_an_unknown_place_is_named_with_the_known_ones():
    """A place that is not there cannot be removed or made ready."""
    places = Places([A100])
    for call in (lambda: places.remove("gpu-9"), lambda: places.set_ready("gpu-9", True)):
        with pytest.raises(InvalidInput, match="no place 'gpu-9'; there are 'gpu-0'"):
            call()


async def test_a_consumer_without_places_warns_once(caplog):
    """A requirement that nothing here can meet is stored, and told in the log: another node may have the place."""
    yard = Yard("memory://")
    yard.consumer()(train)
    async with yard:
        for _ in range(2):
            await yard.submit("train", {"name": "a"}, requires={"model": "t4"})
        assert caplog.text.count("no place fits requires=model here") == 1


def test_a_check_is_an_admission():
    """The port is what a plug-in implements."""
    checks: list[Admission] = [LockFiles()]
    assert checks[0].kinds == ("file_lock",)


async def test_a_thousand_changes_at_once_are_looked_at_once(monkeypatch):
    """Places that become ready in one go cost the node one look, and each that is ready gets a task."""
    places = Places([f"p{n}" for n in range(1000)])
    for place in places:
        places.set_ready(place.name, False)
    yard = Yard("memory://", max_running=1000)
    looks = []
    refresh = Slots.refresh

    def count(slots):
        looks.append(slots)
        refresh(slots)

    @yard.consumer(places=places)
    async def work():
        return current_run().device

    async with yard:
        monkeypatch.setattr(Slots, "refresh", count)
        for place in list(places):
            places.set_ready(place.name, True)
        handles = [await work.submit() for _ in range(1000)]
        assert {await handle.result(timeout_s=20) for handle in handles} <= {place.name for place in places}
        assert len(looks) <= 2


def test_what_does_not_change_is_not_told():
    """A place that is made ready twice is told once; only a change of what there is makes another version."""
    places, told = Places(["a"]), []
    places.subscribe(lambda: told.append(1))
    version = places.version
    places.set_ready("a", True)
    assert told == []
    places.set_ready("a", False)
    places.set_ready("a", False)
    assert (len(told), places.version) == (1, version)
    places.add(Place("a", {"role": "eu"}))
    assert (len(told), places.version) == (2, version + 1)
