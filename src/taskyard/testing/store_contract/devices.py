"""Devices: what defines one, who serves it, what people ask of it, and what its runs leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from taskyard.errors import DeviceBusy, DeviceExists, UnknownDevice
from taskyard.model.audit import TargetKind, command_entry, make_entry
from taskyard.model.device import (
    NOT_CHECKED,
    NOT_SERVED,
    DeviceCommand,
    DeviceHealth,
    DeviceOrders,
    DeviceRun,
    DeviceSpec,
    DeviceState,
    DeviceStatus,
    DrainDevice,
    EditDevice,
    GiveBackDevice,
    HandOverDevice,
    QuarantinedAccount,
    QuarantineDevice,
    RunFilter,
    RunTally,
    TakeDevice,
)
from taskyard.model.event import Event, EventKind
from taskyard.model.execution import ErrorKind
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp, Note, NoteCode
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord
from taskyard.model.why import Reason
from taskyard.ports.device import DeviceReport, DeviceStore
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_node, a_record, an_add, an_error, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, everything, get, settle, tick
from taskyard.testing.store_contract.scenes import why

K = EventKind


def kept(store: Store) -> DeviceStore:
    assert isinstance(store, DeviceStore)
    return store


def a_device(name: str, number: int | None = None, **fields: object) -> DeviceSpec:
    """In the pool "phones", with the number in its name."""
    given = {"pool": "phones", "number": int(name[-1]) if number is None else number, "adapter": "adb", **fields}
    return msgspec.convert({"name": name, **given}, DeviceSpec)


async def put(store: Store, *names: str) -> None:
    """Define these by code."""
    await kept(store).define_devices([a_device(name, from_code=True) for name in names], by="code")


async def look(store: Store, name: str) -> DeviceStatus:
    (found,) = [status for status in await kept(store).list_devices() if status.name == name]
    return found


async def command(store: Store, name: str, asked: DeviceCommand, *, by: str = "ann") -> DeviceStatus:
    return await kept(store).command_device(name, asked, by=by)


def is_up(name: str, since: datetime = NOON) -> DeviceReport:
    return DeviceReport(name, DeviceHealth(is_up=True, since=since, beat_at=since))


def is_down(name: str, reason: str = "no answer", since: datetime = NOON) -> DeviceReport:
    return DeviceReport(name, DeviceHealth(since=since, reason=reason, step="reconnect"))


async def bring_up(store: Store, *names: str, node: str = A) -> None:
    """Define these, and serve them by a node on which they are up."""
    await put(store, *names)
    assert await kept(store).serve_devices(node, names) == list(names)
    assert await kept(store).report_devices(node, [is_up(name) for name in names]) == []


async def run_on(store: Store, device: str, record: TaskRecord, *, node: str = A) -> Claim:
    """Add the task, and start it on the device."""
    await store.turn(node, adds=[an_add(record)])
    (found,) = await store.preview(Demand(1, {}, 1))
    assert found.uuid == record.uuid
    (claim,) = (await store.turn(node, demand=Demand(1, {}, 1, only={found.id: device}))).claims
    return claim


async def run(
    store: Store, clock: ManualClock, device: str, key: str | None, outcome: str = "completed", **fields: object
) -> str:
    """A run of two seconds that ends so; the task."""
    record = a_record(clock.now(), key=key, queue="phones", **fields)
    claim = await run_on(store, device, record)
    at = tick(clock, 2)
    error = an_error(ErrorKind.RUNTIME, "no button")
    moves = {
        "completed": Move.completed(at=at),
        "failed": Move.failed(at=at, error=error),
        "retrying": Move.retrying(at=at, due_at=at + seconds(9000), error=error),
        "canceled": Move.canceled(at=at),
        "lost": Move.lost(at=at, error=error, note=Note(NoteCode.DEVICE_LOST, facts={"device": device})),
        "given back": Move.given_back(at=at),
    }
    await settle(store, claim, moves[outcome])
    return record.uuid


async def told(store: Store, after: int = 0) -> list[Event]:
    """The events of devices and accounts."""
    page = await store.events(after=after)
    return [event for event in page.events if event.kind.startswith(("device_", "account_"))]


async def newest(store: Store) -> int:
    return (await store.events(after=-1)).last


def kinds(events: Sequence[Event]) -> list[tuple[EventKind, str]]:
    return [(event.kind, event.device) for event in events]


def a_quarantine(account: str = "7", consumer: str = "daily", pool: str = "phones") -> QuarantinedAccount:
    stamp = AuditStamp("node-1", NOON, "wrong password")
    return QuarantinedAccount(pool=pool, account=account, consumer=consumer, failures=3, quarantined=stamp)


class DefinitionContract(Desk):
    @pytest.mark.spec("DEV-12")
    async def test_a_device_is_kept_as_it_was_added(self, store: Store, clock: ManualClock) -> None:
        """Every field of a definition comes back; nobody serves the device, so it is down since it was added."""
        spec = a_device(
            "emu-1",
            address="emulator-5554",
            settings={"app": "gr\u00fc\u00df \U0001f600", "tries": [1, 2.5, None]},
            labels={"role": "eu"},
            host="rack-2",
        )
        status = await kept(store).add_device(spec, by="cli:ann")
        assert [status] == await kept(store).list_devices()
        assert (status.spec, status.orders, status.node, status.task) == (spec, DeviceOrders(), "", "")
        assert status.health == DeviceHealth(since=clock.now(), reason=NOT_SERVED)
        assert status.state_at(clock.now()) is DeviceState.DOWN
        (event,) = await told(store)
        assert (event.kind, event.device, event.queue, event.actor) == (K.DEVICE_ADDED, "emu-1", "phones", "cli:ann")
        assert (event.uuid, event.consumer, event.before, event.is_alert) == ("", "", None, False)

    async def test_devices_are_listed_by_pool_number_and_name(self, store: Store) -> None:
        """The list goes by pool, then number; a pool can be asked for alone."""
        for name, number, pool in (("b", 10, "phones"), ("c", 2, "phones"), ("a", 3, "gpus"), ("d", 2, "tablets")):
            await kept(store).add_device(a_device(name, number, pool=pool), by="ann")
        assert [one.name for one in await kept(store).list_devices()] == ["a", "c", "b", "d"]
        assert [one.name for one in await kept(store).list_devices("phones")] == ["c", "b"]
        assert await kept(store).list_devices("nothing") == []

    @pytest.mark.parametrize(
        ("other", "what"),
        [
            pytest.param(a_device("emu-1", 9, pool="other"), "name", id="name"),
            pytest.param(a_device("emu-9", 1), "number", id="number"),
            pytest.param(a_device("emu-9", pool="other", address="serial-1"), "address", id="address"),
        ],
    )
    async def test_two_devices_never_collide(self, store: Store, other: DeviceSpec, what: str) -> None:
        """A name is unique in the store, a number in its pool, an address for its adapter; what collides is not added
        and leaves nothing."""
        await kept(store).add_device(a_device("emu-1", address="serial-1"), by="ann")
        before, stamp = await newest(store), await kept(store).device_stamp()
        for add in (kept(store).add_device(other, by="ann"), kept(store).define_devices([other], by="code")):
            with pytest.raises(DeviceExists) as caught:
                await add
            assert (caught.value.device, caught.value.what) == ("emu-1", what)
        assert len(await kept(store).list_devices()) == 1
        assert (await newest(store), await kept(store).device_stamp()) == (before, stamp)

    async def test_what_does_not_collide(self, store: Store) -> None:
        """Empty addresses never collide, nor do equal numbers of two pools, nor equal addresses of two adapters."""
        specs = [a_device("emu-1"), a_device("emu-2"), a_device("pad-1", pool="pads", address="a")]
        specs.append(a_device("ssh-3", adapter="command", address="a"))
        for spec in specs:
            await kept(store).add_device(spec, by="ann")
        assert len(await kept(store).list_devices()) == 4

    @pytest.mark.spec("DEV-12")
    async def test_code_brings_its_devices_up_to_date(self, store: Store, clock: ManualClock) -> None:
        """A program that starts adds what is new and changes what has changed, in the order it asked; what is as it was
        leaves neither an event nor another stamp. Orders stay."""
        one, two = a_device("emu-1", from_code=True), a_device("emu-2", from_code=True)
        assert [s.spec for s in await kept(store).define_devices([two, one], by="code")] == [two, one]
        await command(store, "emu-1", DrainDevice("fan"))
        stamp, after = await kept(store).device_stamp(), await newest(store)
        await kept(store).define_devices([two, one], by="code")
        assert (await kept(store).device_stamp(), await newest(store)) == (stamp, after)
        changed = msgspec.structs.replace(one, address="serial", labels={"role": "us"}, number=7)
        (status,) = await kept(store).define_devices([changed], by="code")
        assert (status.spec, status.version) == (changed, 3)
        assert status.orders.drained == AuditStamp("ann", clock.now(), "fan")
        assert await kept(store).device_stamp() > stamp
        assert kinds(await told(store, after)) == [(K.DEVICE_CHANGED, "emu-1")]

    async def test_code_may_swap_numbers_and_addresses(self, store: Store) -> None:
        """Two devices that are defined together may swap what must be unique."""
        one, two = a_device("emu-1", address="a", from_code=True), a_device("emu-2", address="b", from_code=True)
        await kept(store).define_devices([one, two], by="code")
        swapped = [
            msgspec.structs.replace(one, number=2, address="b"),
            msgspec.structs.replace(two, number=1, address="a"),
        ]
        assert [s.spec for s in await kept(store).define_devices(swapped, by="code")] == swapped

    @pytest.mark.parametrize(
        "others",
        [
            pytest.param([a_device("emu-2"), a_device("emu-3", 2)], id="of one number"),
            pytest.param([a_device("emu-2"), a_device("emu-2", 3)], id="of one name"),
            pytest.param([a_device("emu-2"), a_device("emu-1", pool="other", from_code=True)], id="of another pool"),
            pytest.param([a_device("emu-2"), a_device("hand-9", from_code=True)], id="of a person"),
        ],
    )
    async def test_devices_that_collide_change_none(self, store: Store, others: list[DeviceSpec]) -> None:
        """If one of the devices of a program collides with another, none of them is added or changed."""
        await put(store, "emu-1")
        await kept(store).add_device(a_device("hand-9"), by="ann")
        before = await kept(store).list_devices()
        with pytest.raises(DeviceExists):
            await kept(store).define_devices([a_device("emu-1", labels={"new": "1"}, from_code=True), *others], by="c")
        assert await kept(store).list_devices() == before

    async def test_what_a_person_edits_stays(self, store: Store) -> None:
        """Labels, settings, the address and the host that a person has edited stay when the program defines the device
        again; the rest is as the program says. A label that was removed stays removed."""
        spec = a_device("emu-1", labels={"role": "us", "zone": "a", "old": "1"}, settings={"app": "x"}, from_code=True)
        await kept(store).define_devices([spec], by="code")
        await command(store, "emu-1", EditDevice(labels={"role": "eu", "old": ""}))
        again = msgspec.structs.replace(
            spec, labels={"role": "us", "zone": "b", "old": "2"}, settings={"app": "y"}, address="serial"
        )
        (status,) = await kept(store).define_devices([again], by="code")
        assert (status.spec.labels, status.spec.settings) == ({"role": "eu", "zone": "b"}, {"app": "y"})
        assert status.spec.address == "serial"
        await command(store, "emu-1", EditDevice(settings={"app": "mine"}))
        (status,) = await kept(store).define_devices([again], by="code")
        assert (status.spec.labels, status.spec.settings) == ({"role": "eu", "zone": "b"}, {"app": "mine"})
        edited = await command(store, "emu-1", EditDevice(address="by hand"))
        assert await kept(store).define_devices([again], by="code") == [edited]
        edited = await command(store, "emu-1", EditDevice(host="rack-1"))
        assert await kept(store).define_devices([again], by="code") == [edited]
        assert (edited.spec.address, edited.spec.host) == ("by hand", "rack-1")
        edited = await command(store, "emu-1", EditDevice(host=""))
        again = msgspec.structs.replace(again, host="rack-2")
        assert await kept(store).define_devices([again], by="code") == [edited]

    async def test_an_edit_changes_what_it_names(self, store: Store) -> None:
        """An edit leaves what it does not name, and one that changes nothing is not told. An address that is taken is
        refused, and everything stays."""
        await kept(store).add_device(a_device("emu-1", address="a", labels={"role": "eu"}), by="ann")
        await kept(store).add_device(a_device("emu-2", address="b"), by="ann")
        edited = await command(store, "emu-1", EditDevice(labels={"zone": "x"}, host="rack"))
        assert edited.spec == a_device("emu-1", address="a", labels={"role": "eu", "zone": "x"}, host="rack")
        stamp, after = await kept(store).device_stamp(), await newest(store)
        assert (await command(store, "emu-1", EditDevice(labels={"zone": "x"}))).version == edited.version
        with pytest.raises(DeviceExists):
            await command(store, "emu-1", EditDevice(address="b"))
        assert (await kept(store).device_stamp(), await newest(store)) == (stamp, after)
        assert await look(store, "emu-1") == edited

    async def test_nobody_commands_an_unknown_device(self, store: Store) -> None:
        """A command for a device that is not in the store is `UnknownDevice`, also after it was removed."""
        await put(store, "emu-1")
        await kept(store).remove_device("emu-1")
        for asked in (DrainDevice(), EditDevice(host="x")):
            with pytest.raises(UnknownDevice):
                await command(store, "emu-1", asked)
        with pytest.raises(UnknownDevice):
            await kept(store).remove_device("emu-1")


class OrderedDeviceContract(Desk):
    @pytest.mark.spec("DEV-12")
    async def test_orders_stay_until_they_are_taken_back(self, store: Store, clock: ManualClock) -> None:
        """Each order is kept with who gave it, when and why; a second time it stays as it was first said; a return
        takes all of them back. Each of them is told once, with its reason."""
        await bring_up(store, "emu-1")
        after, at = await newest(store), clock.now()
        await command(store, "emu-1", DrainDevice("fan"))
        taken = await command(store, "emu-1", TakeDevice("debug", for_s=60))
        assert taken.orders.taken_until == at + seconds(60)
        status = await command(store, "emu-1", QuarantineDevice("smoke"), by="node-1")
        assert status.orders == DeviceOrders(
            drained=AuditStamp("ann", at, "fan"),
            taken=AuditStamp("ann", at, "debug"),
            taken_until=at + seconds(60),
            quarantined=AuditStamp("node-1", at, "smoke"),
        )
        assert status.state_at(at) is DeviceState.QUARANTINED
        stamp = await kept(store).device_stamp()
        tick(clock, 5)
        assert (await command(store, "emu-1", QuarantineDevice("again"), by="bob")).orders == status.orders
        assert await kept(store).device_stamp() == stamp
        given_back = await command(store, "emu-1", GiveBackDevice())
        assert (given_back.orders, given_back.state_at(clock.now())) == (DeviceOrders(), DeviceState.IDLE)
        assert await kept(store).device_stamp() > stamp
        events = await told(store, after)
        assert [(event.kind, event.actor, event.code) for event in events] == [
            (K.DEVICE_DRAINED, "ann", "fan"),
            (K.DEVICE_TAKEN, "ann", "debug"),
            (K.DEVICE_QUARANTINED, "node-1", "smoke"),
            (K.DEVICE_GIVEN_BACK, "ann", ""),
        ]
        assert [event.kind for event in events if event.is_alert] == [K.DEVICE_QUARANTINED]

    async def test_a_device_is_taken_for_a_time(self, store: Store, clock: ManualClock) -> None:
        """Who takes a device for a time has it until then; an order that is given later does not bring it back."""
        await bring_up(store, "emu-1")
        status = await command(store, "emu-1", TakeDevice(for_s=60))
        assert status.state_at(clock.now()) is DeviceState.TAKEN
        tick(clock, 61)
        assert (await look(store, "emu-1")).state_at(clock.now()) is DeviceState.IDLE
        status = await command(store, "emu-1", DrainDevice())
        assert (status.orders.taken, status.orders.taken_until) == (None, None)

    async def test_commands_of_people_are_recorded(self, store: Store, clock: ManualClock) -> None:
        """What a person asks of a device, or of an account, leaves an entry in the audit record if it changes
        something."""
        spec, now = a_device("emu-1"), clock.now()
        added = make_entry("cli:ann", "add_device", TargetKind.DEVICE, "emu-1", now=now)
        await kept(store).add_device(spec, by="cli:ann", audit=added)
        asked = DrainDevice("fan")
        for _ in range(2):
            entry = command_entry("cli:ann", asked, TargetKind.DEVICE, "emu-1", now=now)
            await kept(store).command_device("emu-1", asked, by="cli:ann", audit=entry)
        released = make_entry("cli:ann", "release_account", TargetKind.ACCOUNT, "7", now=now)
        for _ in range(2):
            quarantined = make_entry("cli:ann", "quarantine_account", TargetKind.ACCOUNT, "7", now=now)
            await kept(store).quarantine_account(a_quarantine(), audit=quarantined)
        assert await kept(store).release_account("phones", "7", None, by="cli:ann", audit=released) == 1
        removed = make_entry("cli:ann", "remove_device", TargetKind.DEVICE, "emu-1", now=now)
        await kept(store).remove_device("emu-1", by="cli:ann", audit=removed)
        entries = (await store.list_audit())[::-1]
        names = ["add_device", "drain", "quarantine_account", "release_account", "remove_device"]
        assert [entry.command for entry in entries] == names
        assert [(entry.matched, entry.changed) for entry in entries] == [(1, 1)] * 5
        assert (entries[1].kind, entries[1].target, entries[1].reason) == (TargetKind.DEVICE, "emu-1", "fan")

    async def test_quarantined_accounts(self, store: Store) -> None:
        """An account is quarantined for one consumer of a pool, as it was first said; all of it comes back. It is
        released for one consumer or for all, and both are told and change the stamp."""
        for one in (a_quarantine(), a_quarantine(consumer="weekly"), a_quarantine("8"), a_quarantine(pool="pads")):
            await kept(store).quarantine_account(one)
        after, stamp = await newest(store), await kept(store).device_stamp()
        again = msgspec.structs.replace(a_quarantine(), failures=9)
        await kept(store).quarantine_account(again)
        assert (await newest(store), await kept(store).device_stamp()) == (after, stamp)
        listed = await kept(store).list_quarantined_accounts("phones")
        assert listed == [a_quarantine(), a_quarantine(consumer="weekly"), a_quarantine("8")]
        assert await kept(store).release_account("phones", "7", "daily", by="ann") == 1
        assert await kept(store).release_account("phones", "7", "daily", by="ann") == 0
        assert await kept(store).release_account("phones", "7", None, by="ann") == 1
        left = await kept(store).list_quarantined_accounts()
        assert left == [a_quarantine(pool="pads"), a_quarantine("8")]
        assert await kept(store).device_stamp() > stamp
        events = await told(store)
        assert [(e.kind, e.queue, e.consumer, e.code, e.actor, e.is_alert) for e in events] == [
            (K.ACCOUNT_QUARANTINED, "phones", "daily", "7", "node-1", True),
            (K.ACCOUNT_QUARANTINED, "phones", "weekly", "7", "node-1", True),
            (K.ACCOUNT_QUARANTINED, "phones", "daily", "8", "node-1", True),
            (K.ACCOUNT_QUARANTINED, "pads", "daily", "7", "node-1", True),
            (K.ACCOUNT_RELEASED, "phones", "daily", "7", "ann", False),
            (K.ACCOUNT_RELEASED, "phones", "weekly", "7", "ann", False),
        ]


class PresenceContract(Desk):
    @pytest.mark.spec("DEV-07")
    async def test_one_living_node_serves_a_device(self, store: Store) -> None:
        """A node serves those devices that no other living node does, in the order it asked, and is told which; an
        unknown name is left out. Asking again is the same."""
        await put(store, "emu-1", "emu-2", "emu-3")
        assert await kept(store).serve_devices(A, ["emu-2", "emu-1"]) == ["emu-2", "emu-1"]
        stamp = await kept(store).device_stamp()
        assert await kept(store).serve_devices(A, ["emu-2", "emu-1"]) == ["emu-2", "emu-1"]
        assert await kept(store).device_stamp() == stamp
        assert await kept(store).serve_devices(B, ["emu-3", "emu-1", "nothing"]) == ["emu-3"]
        assert await kept(store).device_stamp() > stamp
        statuses = await kept(store).list_devices()
        assert [(one.node, one.node_name) for one in statuses] == [(A, "a"), (A, "a"), (B, "b")]

    async def test_nodes_that_ask_at_the_same_time_never_share_a_device(self, store: Store) -> None:
        """Of two nodes that ask for the same devices at the same time, each device goes to exactly one."""
        names = [f"emu-{n}" for n in range(10)]
        await put(store, *names)
        asked = [kept(store).serve_devices(node, names[::step]) for node, step in ((A, 1), (B, -1)) * 5]
        answers = await asyncio.gather(*asked)
        by_a, by_b = ({name for one in answers[n::2] for name in one} for n in (0, 1))
        assert by_a | by_b == set(names)
        assert not by_a & by_b
        assert {one.name for one in await kept(store).list_devices() if one.node == A} == by_a

    async def test_a_device_is_down_until_it_is_reported_up(self, store: Store, clock: ManualClock) -> None:
        """Served anew, a device is down until the node says that it is up. Going up and down is told, with the reason,
        and a report that changes neither is not; no report changes the stamp or the version."""
        await put(store, "emu-1")
        await kept(store).serve_devices(A, ["emu-1"])
        status = await look(store, "emu-1")
        assert (status.state_at(clock.now()), status.health.reason) == (DeviceState.DOWN, NOT_CHECKED)
        assert status.health.since == NOON
        after, stamp = await newest(store), await kept(store).device_stamp()
        for report in (is_down("emu-1", "offline"), is_up("emu-1"), is_up("emu-1"), is_down("emu-1", "x" * 300)):
            assert await kept(store).report_devices(A, [report]) == []
            assert (await look(store, "emu-1")).health == report.health
        assert await kept(store).device_stamp() == stamp
        assert (await look(store, "emu-1")).version == status.version
        up, down = await told(store, after)
        assert (up.kind, up.device, up.code) == (K.DEVICE_UP, "emu-1", "")
        assert (down.kind, down.code, down.queue) == (K.DEVICE_DOWN, "x" * 80, "phones")

    async def test_only_the_node_that_serves_a_device_reports_it(self, store: Store) -> None:
        """A report of a node that serves the device no longer, or of a device that is gone, writes nothing, and the
        node is told so; its other reports are written."""
        await bring_up(store, "emu-1", "emu-2", "emu-3")
        await kept(store).unserve_devices(A, ["emu-1"])
        await kept(store).serve_devices(B, ["emu-1"])
        await kept(store).remove_device("emu-2")
        reports = [is_up("emu-1"), is_up("emu-2"), is_down("emu-3")]
        assert await kept(store).report_devices(A, reports) == ["emu-1", "emu-2"]
        assert not (await look(store, "emu-1")).health.is_up
        assert not (await look(store, "emu-3")).health.is_up

    async def test_a_node_lets_go(self, store: Store, clock: ManualClock) -> None:
        """A device that its node lets go of has no node and is down, which is told if it was up; another node may serve
        it at once. A node lets go of its own devices alone."""
        await bring_up(store, "emu-1", "emu-2")
        after, stamp, at = await newest(store), await kept(store).device_stamp(), tick(clock, 5)
        await kept(store).unserve_devices(B, ["emu-1"])
        assert await kept(store).device_stamp() == stamp
        await kept(store).unserve_devices(A, ["emu-1", "nothing"])
        status = await look(store, "emu-1")
        assert (status.node, status.node_name, status.state_at(at)) == ("", "", DeviceState.DOWN)
        assert (status.health.since, status.health.reason) == (at, NOT_SERVED)
        assert await kept(store).device_stamp() > stamp
        assert await kept(store).serve_devices(B, ["emu-1", "emu-2"]) == ["emu-1"]
        (down,) = await told(store, after)
        assert (down.kind, down.device, down.code) == (K.DEVICE_DOWN, "emu-1", NOT_SERVED)

    async def test_a_node_that_leaves_lets_go_of_all(self, store: Store) -> None:
        """The devices of a node that has left have no node; it serves none until it joins again."""
        await store.join(a_node("c"))
        (c,) = [one.node.incarnation for one in await store.nodes() if one.node.name == "c"]
        await bring_up(store, "emu-1", "emu-2", node=c)
        stamp, after = await kept(store).device_stamp(), await newest(store)
        await store.leave(c)
        assert [one.node for one in await kept(store).list_devices()] == ["", ""]
        assert await kept(store).device_stamp() > stamp
        assert sorted(kinds(await told(store, after))) == [(K.DEVICE_DOWN, "emu-1"), (K.DEVICE_DOWN, "emu-2")]
        assert await kept(store).serve_devices(c, ["emu-1"]) == []
        assert await kept(store).report_devices(c, [is_up("emu-1")]) == ["emu-1"]
        assert await kept(store).serve_devices(B, ["emu-1", "emu-2"]) == ["emu-1", "emu-2"]

    @pytest.mark.spec("DEV-11")
    async def test_a_rescue_frees_the_devices(self, store: Store, clock: ManualClock) -> None:
        """The devices of a dead node are free, down and not busy once it is rescued, and its reports count no more; its
        other orders stay. The attempt that it ran says that the node died."""
        await bring_up(store, "emu-1")
        await command(store, "emu-1", DrainDevice())
        record = a_record(clock.now(), key="7", queue="phones")
        await run_on(store, "emu-1", record)
        after = await newest(store)
        assert await store.rescue(A) == [record.uuid]
        status = await look(store, "emu-1")
        assert (status.node, status.task, status.health.is_up) == ("", "", False)
        assert status.orders.drained is not None
        assert await kept(store).report_devices(A, [is_up("emu-1")]) == ["emu-1"]
        assert kinds(await told(store, after)) == [(K.DEVICE_DOWN, "emu-1")]
        ((_, was),) = await kept(store).list_device_runs(RunFilter(device="emu-1"))
        assert (was.outcome, was.account, "died" in was.error) == ("interrupted", "7", True)
        assert (await get(store, record)).error is None

    @pytest.mark.spec("DEV-02")
    async def test_busy_is_what_runs(self, store: Store, clock: ManualClock) -> None:
        """While a task runs on a device the status says which, of which account and since when; then it is idle."""
        await bring_up(store, "emu-1", "emu-2")
        record = a_record(clock.now(), key="7", queue="phones")
        claim = await run_on(store, "emu-2", record)
        idle, busy = await kept(store).list_devices()
        assert (idle.task, idle.account, idle.busy_since) == ("", "", None)
        assert (busy.task, busy.account, busy.busy_since) == (record.uuid, "7", claim.record.started_at)
        assert busy.state_at(clock.now()) is DeviceState.BUSY
        drained = await command(store, "emu-2", DrainDevice())
        assert (drained.task, drained.state_at(clock.now())) == (record.uuid, DeviceState.DRAINING)
        await settle(store, claim, Move.completed(at=tick(clock, 1)))
        assert (await look(store, "emu-2")).task == ""

    async def test_the_time_of_a_take_waits_for_the_run(self, store: Store, clock: ManualClock) -> None:
        """Who takes a busy device for a time has it from when its node hands it over, once. That is told as well."""
        await bring_up(store, "emu-1")
        claim = await run_on(store, "emu-1", a_record(clock.now(), key="7", queue="phones"))
        after, at = await newest(store), clock.now()
        taken = (await command(store, "emu-1", TakeDevice("a bug", for_s=60))).orders
        assert taken == DeviceOrders(taken=AuditStamp("ann", at, "a bug"), taken_for_s=60)
        ended = tick(clock, 100)
        assert (await look(store, "emu-1")).state_at(ended) is DeviceState.DRAINING
        await settle(store, claim, Move.completed(at=ended))
        assert (await look(store, "emu-1")).state_at(ended) is DeviceState.TAKEN
        mine = await command(store, "emu-1", HandOverDevice("a bug"))
        assert mine.orders == DeviceOrders(taken=taken.taken, taken_until=ended + seconds(60))
        tick(clock, 30)
        assert await command(store, "emu-1", HandOverDevice("a bug")) == mine
        assert mine.state_at(tick(clock, 31)) is DeviceState.IDLE
        events = await told(store, after)
        assert [(event.kind, event.actor, event.code) for event in events] == [(K.DEVICE_TAKEN, "ann", "a bug")] * 2

    async def test_a_busy_device_is_removed_by_force(self, store: Store, clock: ManualClock) -> None:
        """A device that a task runs on is removed by force alone; its name and number are free then, and its runs stay
        in the history."""
        await bring_up(store, "emu-1")
        record = a_record(clock.now(), queue="phones")
        claim = await run_on(store, "emu-1", record)
        with pytest.raises(DeviceBusy) as caught:
            await kept(store).remove_device("emu-1")
        assert (caught.value.device, caught.value.task) == ("emu-1", record.uuid)
        assert (await look(store, "emu-1")).node == A
        stamp, after = await kept(store).device_stamp(), await newest(store)
        await kept(store).remove_device("emu-1", force=True, by="ann")
        assert await kept(store).list_devices() == []
        assert await kept(store).device_stamp() > stamp
        (event,) = await told(store, after)
        assert (event.kind, event.device, event.actor) == (K.DEVICE_REMOVED, "emu-1", "ann")
        await settle(store, claim, Move.completed(at=tick(clock, 1)))
        await kept(store).add_device(a_device("emu-1"), by="ann")
        assert [one.task for _, one in await kept(store).list_device_runs(RunFilter(device="emu-1"))] == [record.uuid]


class DeviceHistoryContract(Desk):
    async def test_runs_are_listed_newest_first(self, store: Store, clock: ManualClock) -> None:
        """The history has each attempt on a device with its account, its times and its outcome, those that run first;
        runs without a device are not in it."""
        first = await run(store, clock, "emu-1", "7")
        failed = await run(store, clock, "emu-2", None, "failed")
        await store.turn(A, adds=[an_add(a_record(clock.now(), queue="other"))])
        (elsewhere,) = (await store.turn(A, demand=Demand(1, {}, 1))).claims
        at = clock.now()
        running = await run_on(store, "emu-1", a_record(clock.now(), key="7", queue="phones"))
        runs = [one for _, one in await kept(store).list_device_runs(RunFilter())]
        assert [(one.task, one.device, one.account, one.outcome) for one in runs] == [
            (running.uuid, "emu-1", "7", "running"),
            (failed, "emu-2", "", "failed"),
            (first, "emu-1", "7", "completed"),
        ]
        assert runs[0] == DeviceRun(
            device="emu-1", account="7", consumer="fetch", task=running.uuid, attempt=1, started_at=at,
            finished_at=None, outcome="running",
        )  # fmt: skip
        assert (runs[1].error, runs[1].finished_at, runs[2].error) == ("no button", at, "")
        await settle(store, elsewhere, Move.completed(at=at))

    async def test_runs_are_filtered_and_paged(self, store: Store, clock: ManualClock) -> None:
        """The history can be asked for by pool, device, account, consumer and time, and page by page."""
        tasks = [
            await run(store, clock, device, key, consumer=consumer)
            for device, key, consumer in (
                ("emu-1", "7", "fetch"),
                ("emu-1", "8", "shrink"),
                ("emu-2", "7", "fetch"),
                ("emu-1", "7", "shrink"),
            )
        ]

        async def found(**asked: object) -> list[int]:
            where = msgspec.structs.replace(RunFilter(), **asked)
            return [tasks.index(one.task) for _, one in await kept(store).list_device_runs(where)]

        assert await found(pool="phones") == [3, 2, 1, 0]
        assert await found(pool="pads") == []
        assert await found(device="emu-1") == [3, 1, 0]
        assert await found(account="7") == [3, 2, 0]
        assert await found(account="7", device="emu-1") == [3, 0]
        assert await found(consumer="shrink", pool="phones") == [3, 1]
        assert await found(since=NOON + seconds(4)) == [3, 2]
        pages, before = [], None
        while page := await kept(store).list_device_runs(RunFilter(device="emu-1"), limit=2, before=before):
            before = page[-1][0]
            pages.append([tasks.index(one.task) for _, one in page])
        assert pages == [[3, 1], [0]]

    async def test_runs_are_tallied(self, store: Store, clock: ManualClock) -> None:
        """Runs are counted by how they ended, by device or by account: a failure that is tried again is a failure, and
        what was given back does not count. What runs is not counted yet."""
        for device, key, outcome in (
            ("emu-1", "7", "completed"),
            ("emu-1", "7", "retrying"),
            ("emu-1", "8", "failed"),
            ("emu-2", "8", "canceled"),
            ("emu-2", None, "completed"),
            ("emu-2", "9", "given back"),
        ):
            await run(store, clock, device, key, outcome)
        end = clock.now()
        by_device = await kept(store).tally_device_runs(RunFilter(pool="phones"))
        assert by_device == [
            RunTally(name="emu-1", completed=1, failed=2, busy_s=6.0, last_at=NOON + seconds(6)),
            RunTally(name="emu-2", completed=1, canceled=1, busy_s=4.0, last_at=end - seconds(2)),
        ]
        assert by_device[0].success_rate == pytest.approx(1 / 3)
        assert await kept(store).tally_device_runs(RunFilter(consumer="fetch"), by_account=True) == [
            RunTally(name="7", completed=1, failed=1, busy_s=4.0, last_at=NOON + seconds(4)),
            RunTally(name="8", failed=1, canceled=1, busy_s=4.0, last_at=NOON + seconds(8)),
        ]
        assert [one.completed for one in await kept(store).tally_device_runs(RunFilter(device="emu-2"))] == [1]
        assert await kept(store).tally_device_runs(RunFilter(pool="pads")) == []

    async def test_a_dead_node_counts_as_an_interruption(self, store: Store, clock: ManualClock) -> None:
        """A run whose node died is counted as interrupted."""
        await run_on(store, "emu-1", a_record(clock.now(), queue="phones"), node=B)
        await store.rescue(B)
        (tally,) = await kept(store).tally_device_runs(RunFilter())
        assert (tally.interrupted, tally.success_rate) == (1, 0.0)

    async def test_a_task_that_fails_with_its_device_leaves_an_interrupted_run(
        self, store: Store, clock: ManualClock
    ) -> None:
        """The task has failed, with the error; its last run is counted as interrupted."""
        uuid = await run(store, clock, "emu-1", "7", "lost")
        record = (await everything(store))[uuid]
        assert (record.state, record.error) == (TaskState.FAILED, an_error(ErrorKind.RUNTIME, "no button"))
        assert [one.state for one in await store.list_attempts(uuid)] == [TaskState.INTERRUPTED]
        ((_, listed),) = await kept(store).list_device_runs(RunFilter(account="7"))
        assert (listed.outcome, listed.error) == ("interrupted", "no button")
        (tally,) = await kept(store).tally_device_runs(RunFilter())
        assert (tally.failed, tally.interrupted) == (0, 1)

    async def test_of_pruned_tasks_nothing_is_left(self, store: Store, clock: ManualClock) -> None:
        """The history goes with its tasks; the devices and the quarantined accounts stay."""
        await put(store, "emu-1")
        await kept(store).quarantine_account(a_quarantine())
        await run(store, clock, "emu-1", "7")
        kept_task = await run(store, clock, "emu-1", "7")
        at = tick(clock, 1)
        assert await store.prune(finished_before=at - seconds(2)) == 1
        assert [one.task for _, one in await kept(store).list_device_runs(RunFilter(account="7"))] == [kept_task]
        assert [one.completed for one in await kept(store).tally_device_runs(RunFilter())] == [1]
        assert len(await kept(store).list_devices()) == 1
        assert len(await kept(store).list_quarantined_accounts()) == 1

    async def test_a_device_of_each_attempt(self, store: Store, clock: ManualClock) -> None:
        """A task that ran on one device and then on another has an attempt in the history of each."""
        record = a_record(clock.now(), key="7", queue="phones")
        claim = await run_on(store, "emu-1", record)
        at = tick(clock, 1)
        await settle(store, claim, Move.retrying(at=at, due_at=at, error=an_error()))
        await store.turn(A)
        (found,) = await store.preview(Demand(1, {}, 1))
        (claim,) = (await store.turn(A, demand=Demand(1, {}, 1, only={found.id: "emu-2"}))).claims
        await settle(store, claim, Move.completed(at=tick(clock, 1)))
        runs = [one for _, one in await kept(store).list_device_runs(RunFilter(account="7"))]
        assert [(one.device, one.attempt, one.outcome) for one in runs] == [
            ("emu-2", 2, "completed"),
            ("emu-1", 1, TaskState.RETRYING.value),
        ]
        assert [tally.name for tally in await kept(store).tally_device_runs(RunFilter())] == ["emu-1", "emu-2"]


class DeviceSceneContract(Desk):
    async def test_why_a_task_of_a_pool_waits(self, store: Store, clock: ManualClock) -> None:
        """The head of a pool is told which of its devices are busy or down; the task behind it waits for the head."""
        await store.set_queue(QueueSettings(name="phones", order=QueueOrder.FIFO))
        await bring_up(store, "emu-1")
        await kept(store).add_device(a_device("emu-2"), by="ann")
        await kept(store).add_device(a_device("pad-1", pool="pads"), by="ann")
        running = await run_on(store, "emu-1", a_record(clock.now(), queue="phones"))
        head, behind = a_record(clock.now(), queue="phones"), a_record(clock.now(), queue="phones")
        await store.turn(A, adds=[an_add(head, behind)])
        found = await why(store, head)
        since = f"{NOON:%Y-%m-%d %H:%M:%S} UTC"
        assert found.text == f"no idle device: 1 busy, 1 down since {since} ({NOT_SERVED})"
        assert (found.reason, found.blocker) == (Reason.DEVICES_BUSY, running.uuid)
        assert (await why(store, behind)).reason is Reason.HEAD_OF_LINE
        snapshot = await store.queue_snapshot("phones", limit=10)
        assert [one.name for one in snapshot.scene.devices["phones"]] == ["emu-1", "emu-2"]
        await settle(store, running, Move.completed(at=clock.now()))
        assert (await why(store, head)).reason is Reason.TURN


class DeviceContract(
    DefinitionContract, OrderedDeviceContract, PresenceContract, DeviceHistoryContract, DeviceSceneContract
):
    """What a `DeviceStore` must do."""


class DurableDeviceContract(DeviceContract):
    """The same for a store that several processes open."""

    @pytest.fixture
    async def other(self, store: Store, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
        """The same store, opened again as another process does."""
        other = self.make_store(clock, tmp_path)
        await other.open()
        yield other
        await other.close()

    async def test_another_process_sees_the_devices(self, store: Store, other: Store, clock: ManualClock) -> None:
        """What one process writes of devices and accounts, another one reads, with the same stamp."""
        await bring_up(store, "emu-1", "emu-2")
        await kept(store).quarantine_account(a_quarantine())
        await command(other, "emu-2", TakeDevice("debug", for_s=60))
        await run(store, clock, "emu-1", "7")
        assert await kept(other).list_devices() == await kept(store).list_devices()
        assert await kept(other).list_quarantined_accounts() == [a_quarantine()]
        assert await kept(other).device_stamp() == await kept(store).device_stamp()
        for where in (RunFilter(), RunFilter(pool="phones", account="7")):
            assert await kept(other).list_device_runs(where) == await kept(store).list_device_runs(where)
            assert await kept(other).tally_device_runs(where) == await kept(store).tally_device_runs(where)

    @pytest.mark.spec("DEV-05")
    async def test_two_processes_never_serve_one_device(self, store: Store, other: Store) -> None:
        """Two processes that ask for the same devices at the same time never get the same one."""
        names = [f"emu-{n}" for n in range(10)]
        await put(store, *names)
        asked = [kept(at).serve_devices(node, [name]) for name in names for at, node in ((store, A), (other, B))]
        answers = await asyncio.gather(*asked)
        by_a, by_b = ({name for one in answers[n::2] for name in one} for n in (0, 1))
        assert (by_a | by_b, by_a & by_b) == (set(names), set())
        assert {one.name: one.node for one in await kept(other).list_devices()} == (
            dict.fromkeys(by_a, A) | dict.fromkeys(by_b, B)
        )

    async def test_commands_of_two_processes_are_all_carried_out(self, store: Store, other: Store) -> None:
        """Edits of one device that two processes make at the same time are all in its definition, each as a version."""
        await put(store, "emu-1")
        edits = [
            command(at, "emu-1", EditDevice(labels={f"label-{n}": name}))
            for n in range(5)
            for at, name in ((store, "one"), (other, "two"))
        ]
        await asyncio.gather(*edits)
        status = await look(store, "emu-1")
        assert set(status.spec.labels) == {f"label-{n}" for n in range(5)}
        assert status.version == 11

    async def test_devices_that_are_defined_at_the_same_time(self, store: Store, other: Store) -> None:
        """Two processes of one program that start at the same time define its devices once."""
        specs = [a_device(f"emu-{n}", from_code=True) for n in range(5)]
        await asyncio.gather(*[kept(at).define_devices(specs, by="code") for at in (store, other)])
        assert [status.spec for status in await kept(store).list_devices()] == specs
        assert kinds(await told(store)) == [(K.DEVICE_ADDED, spec.name) for spec in specs]
