"""Devices through the application: documents that survive JSON, the overview, and what is read of the store."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskyard import Task, Yard
from taskyard.application.device_documents import (
    DeviceChange,
    DeviceCommand,
    DeviceOverview,
    DeviceRequest,
    DrainDevice,
    GiveBackDevice,
    QuarantineDevice,
    RunQuery,
    TakeDevice,
)
from taskyard.application.device_overview import PoolRate
from taskyard.application.device_reading import device_fields, parse_place
from taskyard.application.errors import NotQuarantined, UnknownPool
from taskyard.application.local import LocalApplication
from taskyard.application.opening import open_application
from taskyard.devices import Device, GameAccount, SimulatedDevice
from taskyard.errors import DeviceBusy, DeviceExists, InvalidInput, UnknownDevice
from taskyard.model.device import DeviceHealth, DeviceOrders, DeviceSpec, DeviceState, DeviceStatus
from taskyard.model.notes import AuditStamp
from tests.application.test_calls import ANA, through_json

LONG_S = 30.0


class Work:
    """A pool of phones whose consumer waits until it may go on."""

    def __init__(self, store: str | Path) -> None:
        self.yard = Yard(store)
        self.pool = self.yard.device_pool(
            "phones", devices=[SimulatedDevice(n, name=f"emu-{n}") for n in (1, 2)], heartbeat_s=1.0
        )
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.go = asyncio.Event()

        @self.pool.consumer(name="daily")
        async def daily(device: Device, account: GameAccount, fails: bool = False) -> int | str:
            self.begun.put_nowait(device.name)
            await self.go.wait()
            if fails:
                raise ValueError("bad luck")
            return account.account_id

    async def enqueue(self, account: int | str, **args: Any) -> str:
        """The name of the device on which it runs."""
        assert await self.pool.enqueue(Task(source="daily", args=args), GameAccount(account))
        async with asyncio.timeout(LONG_S):
            return await self.begun.get()


async def until(application: LocalApplication, holds: Callable[[DeviceOverview], bool]) -> DeviceOverview:
    """The first overview of which this is true."""
    overviews: Any = application.devices.watch("phones", min_interval_s=0.0)
    async with asyncio.timeout(LONG_S), aclosing(overviews):
        async for one in overviews:
            if holds(one):
                found: DeviceOverview = one
                return found
    raise AssertionError("the watch ended")


def states(seen: DeviceOverview) -> list[str]:
    return [str(device.state) for device in seen.devices]


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'work.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[LocalApplication]:
    """On a yard that serves no device."""
    async with open_application(Yard(tmp_path / "work.db"), actor=ANA, create=True) as opened:
        yield opened


async def add(application: LocalApplication, *names: str, **settings: Any) -> None:
    for name in names:
        await application.devices.add(DeviceRequest(name=name, pool="phones", adapter="simulated", **settings))


# --- at work ----------------------------------------------------------------------------------------------------------


async def test_the_overview_follows_devices_and_their_tasks(store: str) -> None:
    """Busy with task, account and consumer, then idle since the run ended; the pool has its queue and its success rate;
    the events are newest first."""
    work = Work(store)
    async with work.yard, open_application(work.yard, actor=ANA) as application:
        await until(application, lambda seen: states(seen) == ["idle", "idle"])
        name = await work.enqueue(7)
        await work.enqueue("eight", fails=True)
        busy = await until(application, lambda seen: states(seen) == ["busy", "busy"])
        (first,) = [device for device in busy.devices if device.name == name]
        assert (first.account, first.consumer, first.since) == (7, "daily", first.busy_since)
        assert (busy.pools[0].running, busy.pools[0].states) == (2, {DeviceState.BUSY: 2})
        assert through_json(busy) == busy
        work.go.set()
        ended = await until(
            application, lambda seen: states(seen) == ["idle", "idle"] and seen.pools[0].success_rate is not None
        )
        (idle,) = [device for device in ended.devices if device.name == name]
        run, *_ = (await application.devices.history(RunQuery(devices=(name,)))).runs
        assert (idle.since, idle.task) == (run.finished_at, None)
        assert ended.pools[0].rate > 0
        told = [(event.kind, event.device) for event in ended.events if event.uuid]
        assert {kind for kind, _ in told} == {"completed", "failed"}
        assert {device for _, device in told} == {"emu-1", "emu-2"}
        assert [event.seq for event in ended.events] == sorted((event.seq for event in ended.events), reverse=True)


async def test_history_is_added_up_and_paged(store: str) -> None:
    """Rates by device and by account, the lowest first; an account keeps its type; the pages of the runs join."""
    work = Work(store)
    work.go.set()
    async with work.yard, open_application(work.yard, actor=ANA) as application:
        devices = application.devices
        await until(application, lambda seen: states(seen) == ["idle", "idle"])
        for account, fails in ((7, False), ("7", True), (8, False)):
            await work.enqueue(account, fails=fails)
        await until(application, lambda seen: seen.pools[0].running == 0)
        history = await devices.history(RunQuery(pool="phones"))
        assert [(one.account, one.success_rate) for one in history.accounts] == [("7", 0.0), (7, 1.0), (8, 1.0)]
        assert [run.account for run in history.runs] == [8, "7", 7]
        assert sum(one.completed for one in history.devices) == 2
        assert through_json(history) == history
        page = await devices.history(RunQuery(), limit=2)
        rest = await devices.history(RunQuery(), before=page.next)
        assert (*page.runs, *rest.runs) == history.runs
        assert (rest.next, rest.devices, rest.accounts) == (None, (), ())
        only = await devices.history(RunQuery(account="7", devices=("emu-1", "emu-2")))
        assert [run.error for run in only.runs] == ["bad luck"]
        assert (await devices.history(RunQuery(since=datetime.now(UTC) + timedelta(hours=1)))).runs == ()
        detail = await devices.get("emu-1")
        assert detail.tally.completed + detail.tally.failed == len(detail.runs)
        assert through_json(detail) == detail


async def test_a_busy_device_is_not_removed_without_force(tmp_path: Path) -> None:
    """The refusal names the task; by force the device goes, and its run is interrupted."""
    work = Work(tmp_path / "work.db")
    async with work.yard, open_application(work.yard, actor=ANA) as application:
        await until(application, lambda seen: states(seen) == ["idle", "idle"])
        name = await work.enqueue(7)
        (refused,) = await application.devices.remove([name])
        assert (refused.ok, refused.error is not None and refused.error.code) == (False, DeviceBusy.code)
        (removed,) = await application.devices.remove([name], force=True)
        assert (removed.ok, removed.device) == (True, None)
        await until(application, lambda seen: name not in [device.name for device in seen.devices])
        work.go.set()


# --- requests ---------------------------------------------------------------------------------------------------------


COMMANDS = [
    pytest.param(b'{"type":"drain","reason":"moving"}', DrainDevice(reason="moving"), id="drain"),
    pytest.param(b'{"type":"take","for_s":60}', TakeDevice(for_s=60.0), id="take"),
    pytest.param(b'{"type":"quarantine"}', QuarantineDevice(), id="quarantine"),
    pytest.param(b'{"type":"give_back"}', GiveBackDevice(), id="give_back"),
]


@pytest.mark.parametrize(("text", "command"), COMMANDS)
def test_a_command_is_read_from_json(text: bytes, command: DeviceCommand) -> None:
    """A client sends a command with its type; an unknown field is refused, not ignored."""
    assert msgspec.json.decode(text, type=DeviceCommand) == command
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text.replace(b"}", b',"code":"x"}'), type=DeviceCommand)


@pytest.mark.parametrize("wrong", [{"for_s": 0.0}, {"for_s": float("nan")}, {"reason": "x" * 501}])
def test_a_command_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """When it is made, before a store is asked."""
    with pytest.raises(InvalidInput):
        TakeDevice(**wrong)


async def test_a_device_gets_the_next_number_of_its_pool(application: LocalApplication) -> None:
    """The highest plus one, also if two are added at once; a number that is given must be free."""
    await add(application, "emu-7", number=7)
    await asyncio.gather(*(add(application, f"new-{n}") for n in range(5)))
    assert sorted(one.number for one in await application.devices.list("phones")) == [7, 8, 9, 10, 11, 12]
    with pytest.raises(DeviceExists):
        await add(application, "other", number=7)


async def test_a_kind_that_the_pool_does_not_serve_is_refused(tmp_path: Path) -> None:
    """Where the program of the pool is known, a device of commands is refused at once if that does not name the kind;
    elsewhere its nodes decide. Editing one is no reason to refuse it."""
    lab = DeviceRequest(name="lab", pool="phones", adapter="command", settings={"health": "true"})
    async with open_application(Work(tmp_path / "work.db").yard, actor=ANA, create=True) as application:
        with pytest.raises(InvalidInput, match=r"the pool does not serve.*adapters=\[CommandDevice\]"):
            await application.devices.add(lab)
    async with open_application(Yard(tmp_path / "work.db"), actor=ANA) as application:
        await application.devices.add(lab)
    async with open_application(Work(tmp_path / "work.db").yard, actor=ANA) as application:
        receipt = await application.devices.edit("lab", DeviceChange(settings={"timeout_s": 5}))
        assert receipt.device is not None
        assert receipt.device.settings == {"health": "true", "timeout_s": 5}


async def test_settings_are_merged_and_secrets_hidden(application: LocalApplication) -> None:
    """An edit changes the settings that it names, and removes those that are null; a text is taken where the adapter
    wants one; documents hide secrets."""
    request = DeviceRequest(
        name="lab", pool="gpus", adapter="command", settings={"health": True, "timeout_s": 5},
        settings_text={"health": "true", "timeout_s": "5"},
    )  # fmt: skip
    added = await application.devices.add(request)
    assert added.settings == {"health": "true", "timeout_s": 5}
    change = DeviceChange(settings={"timeout_s": None, "health": False}, settings_text={"health": "false"})
    edited = (await application.devices.edit("lab", change)).device
    assert edited is not None
    assert edited.settings == {"health": "false"}
    with pytest.raises(InvalidInput, match="the setting health must be"):
        await application.devices.edit("lab", DeviceChange(settings={"health": 7}))
    spec = DeviceSpec(pool="p", name="n", number=1, adapter="own", settings={"token": "xyzzy", "port": 1})
    fields = device_fields(DeviceStatus(spec=spec), None, None, now=datetime.now(UTC))
    assert fields["settings"] == {"token": "***", "port": 1}


async def test_names_that_nothing_has_are_refused(application: LocalApplication) -> None:
    """With close ones; a pool without devices is known if there is a queue of this name."""
    await add(application, "emu-1")
    devices = application.devices
    for call in (devices.list, devices.overview):
        with pytest.raises(UnknownPool, match="did you mean 'phones'"):
            await call("phone")
    await application.queues.list()
    with pytest.raises(UnknownDevice, match="did you mean 'emu-1'"):
        await devices.get("emu1")
    with pytest.raises(UnknownDevice):
        await devices.edit("emu1", DeviceChange(host="lab"))
    with pytest.raises(NotQuarantined):
        await devices.release(7)
    for place in ("", "7", "7-", "x-1", "-1-2", "1" * 50 + "-1"):
        with pytest.raises(InvalidInput, match="before is no place in a history"):
            parse_place(place)


# --- states -----------------------------------------------------------------------------------------------------------

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
EARLIER = NOON - timedelta(hours=1)
STAMP = AuditStamp("cli:ana", NOON - timedelta(minutes=5), "a bug")
UP = DeviceHealth(is_up=True, since=EARLIER)
DOWN = DeviceHealth(is_up=False, since=EARLIER, reason="no answer", step="reconnect")
LATER = NOON + timedelta(minutes=5)
STATES = [
    pytest.param({"health": UP}, ("idle", EARLIER, "", "", None), id="idle"),
    pytest.param({"health": UP, "task": "t", "busy_since": NOON}, ("busy", NOON, "", "", None), id="busy"),
    pytest.param({"health": DOWN}, ("down", EARLIER, "no answer", "", None), id="down"),
    pytest.param(
        {"health": UP, "orders": DeviceOrders(drained=STAMP)},
        ("draining", STAMP.at, "a bug", "cli:ana", None),
        id="drained",
    ),
    pytest.param(
        {"health": UP, "orders": DeviceOrders(taken=STAMP, taken_until=LATER)},
        ("taken", STAMP.at, "a bug", "cli:ana", LATER),
        id="taken",
    ),
    pytest.param(
        {"health": UP, "orders": DeviceOrders(taken=STAMP, taken_until=LATER), "task": "t", "busy_since": NOON},
        ("draining", STAMP.at, "a bug", "cli:ana", LATER),
        id="taken-while-busy",
    ),
    pytest.param(
        {"health": UP, "orders": DeviceOrders(taken=STAMP, taken_until=EARLIER)},
        ("idle", EARLIER, "", "", None),
        id="taken-until-now",
    ),
    pytest.param(
        {"health": DOWN, "orders": DeviceOrders(quarantined=STAMP, drained=STAMP)},
        ("quarantined", STAMP.at, "a bug", "cli:ana", None),
        id="quarantined",
    ),
]


@pytest.mark.parametrize(("given", "expected"), STATES)
def test_a_state_has_its_beginning_reason_and_author(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Of several facts, those of the state that is shown."""
    spec = DeviceSpec(pool="phones", name="emu-1", number=1, adapter="simulated")
    status = DeviceStatus(spec=spec, node="n", **given)
    fields = device_fields(status, None, None, now=NOON)
    assert tuple(fields[name] for name in ("state", "since", "reason", "by", "until")) == expected


def test_an_idle_device_is_idle_since_its_last_run() -> None:
    """Or since it came up, if that was later."""
    spec = DeviceSpec(pool="phones", name="emu-1", number=1, adapter="simulated")
    status = DeviceStatus(spec=spec, node="n", health=UP)
    assert device_fields(status, None, NOON, now=NOON)["since"] == NOON
    assert device_fields(status, None, EARLIER - timedelta(hours=1), now=NOON)["since"] == EARLIER


def test_the_rate_of_a_pool_is_that_of_the_last_minute() -> None:
    """At first it is what was read of the events; a minute later only what was counted since; pruning is no rate."""
    rate = PoolRate(2.0)
    samples = [(100, 0.0), (130, 30.0), (160, 60.0), (220, 120.0), (10, 180.0)]
    assert [rate.after(finished, now_mono) for finished, now_mono in samples] == [2.0, 1.5, 1.0, 1.0, 0.0]
