"""What the stores share about devices: what each verb makes of the devices that are stored, and what it tells. Pure.

A store reads, asks one of these functions, and writes the changes with their events in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from taskyard.errors import DeviceExists, UnknownDevice
from taskyard.model.device import (
    NOT_CHECKED,
    NOT_SERVED,
    DeviceCommand,
    DeviceEdits,
    DeviceHealth,
    DeviceOrders,
    DeviceSpec,
    DeviceStatus,
    DrainDevice,
    EditDevice,
    GiveBackDevice,
    HandOverDevice,
    QuarantineDevice,
    TakeDevice,
    edit_device,
    order_device,
)
from taskyard.model.event import EventDetail, EventKind
from taskyard.ports.device import DeviceReport

CODE_CHARS = 80
"""Characters of a reason that an event keeps."""


class StoredDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as it is kept. `node` is the incarnation that serves it; a node that goes lets go of it in the same
    transaction."""

    spec: DeviceSpec
    edits: DeviceEdits = DeviceEdits()
    orders: DeviceOrders = DeviceOrders()
    health: DeviceHealth
    version: int = 1
    node: str = ""

    def changed(self, **fields: object) -> StoredDevice:
        """The same with other fields, as the next version."""
        return msgspec.structs.replace(self, version=self.version + 1, **fields)


class Occupation(msgspec.Struct, frozen=True):
    """The task that runs on a device: its uuid, its key, and since when."""

    task: str
    account: str
    since: datetime


class Change(msgspec.Struct, frozen=True):
    """A device after a verb, and what is told of it."""

    device: StoredDevice
    kind: EventKind | None = None
    actor: str = ""
    code: str = ""

    @property
    def detail(self) -> EventDetail:
        return device_detail(self.device.spec.name, actor=self.actor, code=self.code)


Known = Mapping[str, StoredDevice]
"""The devices of a store by name."""


def device_detail(name: str, *, actor: str = "", code: str = "") -> EventDetail:
    return EventDetail(device=name, actor=actor, code=code[:CODE_CHARS])


def account_detail(account: str, by: str) -> EventDetail:
    return EventDetail(actor=by, code=account)


def get_device(known: Known, name: str) -> StoredDevice:
    if (found := known.get(name)) is None:
        raise UnknownDevice(name)
    return found


def make_status(device: StoredDevice, *, node_name: str = "", busy: Occupation | None = None) -> DeviceStatus:
    return DeviceStatus(
        spec=device.spec,
        orders=device.orders,
        health=device.health,
        version=device.version,
        node=device.node,
        node_name=node_name,
        task="" if busy is None else busy.task,
        account="" if busy is None else busy.account,
        busy_since=None if busy is None else busy.since,
    )


def shown_first(device: StoredDevice | DeviceStatus) -> tuple[str, int, str]:
    """The order of a list of devices."""
    return device.spec.pool, device.spec.number, device.spec.name


# --- definitions ------------------------------------------------------------------------------------------------------


def plan_add(spec: DeviceSpec, known: Known, *, by: str, now: datetime) -> Change:
    if spec.name in known:
        raise _exists("name", spec.name, known[spec.name].spec)
    _check_unique([spec], known)
    return _added(spec, by, now)


def plan_definitions(specs: Sequence[DeviceSpec], known: Known, *, by: str, now: datetime) -> list[Change]:
    """Only what is new or has changed."""
    changes = []
    wanted: dict[str, DeviceSpec] = {}
    for spec in specs:
        old = known.get(spec.name)
        if spec.name in wanted or (old is not None and not (old.spec.from_code and old.spec.pool == spec.pool)):
            raise _exists("name", spec.name, wanted.get(spec.name) or known[spec.name].spec)
        wanted[spec.name] = spec if old is None else old.edits.applied(spec, old.spec)
    _check_unique(wanted.values(), known)
    for name, spec in wanted.items():
        if (old := known.get(name)) is None:
            changes.append(_added(spec, by, now))
        elif old.spec != spec:
            changes.append(Change(old.changed(spec=spec), EventKind.DEVICE_CHANGED, by))
    return changes


def _added(spec: DeviceSpec, by: str, now: datetime) -> Change:
    health = DeviceHealth(since=now, reason=NOT_SERVED)
    return Change(StoredDevice(spec=spec, health=health), EventKind.DEVICE_ADDED, by)


def _exists(what: str, value: object, owner: DeviceSpec) -> DeviceExists:
    return DeviceExists(owner.name, what, value, pool=owner.pool, owner_number=owner.number)


def _check_unique(changed: Collection[DeviceSpec], known: Known) -> None:
    """No two devices of a pool have one number, and no two of an adapter one address, after these have changed."""
    names = {spec.name for spec in changed}
    taken: dict[tuple[object, ...], DeviceSpec] = {}
    others = (device.spec for name, device in known.items() if name not in names)
    for spec in (*others, *changed):
        claims: list[tuple[str, object, str]] = [("number", spec.number, spec.pool)]
        if spec.address:
            claims.append(("address", spec.address, spec.adapter))
        for claim in claims:
            if (owner := taken.setdefault(claim, spec)).name != spec.name:
                raise _exists(claim[0], claim[1], owner)


# --- commands ---------------------------------------------------------------------------------------------------------


def plan_command(
    name: str, command: DeviceCommand, known: Known, *, by: str, now: datetime, is_busy: bool
) -> Change | None:
    """None if it changes nothing. An edit of the address has to know all devices, and only `TakeDevice` has to know
    whether a task runs there."""
    device = get_device(known, name)
    if isinstance(command, EditDevice):
        return _plan_edit(device, command, known, by)
    before = device.orders.at(now)
    after = order_device(before, command, by=by, now=now, is_busy=is_busy)
    if after is before:
        return None
    return Change(device.changed(orders=after), _TOLD[type(command)], by, command.reason)


def _plan_edit(device: StoredDevice, command: EditDevice, known: Known, by: str) -> Change | None:
    spec = edit_device(device.spec, command)
    edits = device.edits.after(command) if device.spec.from_code else device.edits
    if spec == device.spec and edits == device.edits:
        return None
    _check_unique([spec], known)
    return Change(device.changed(spec=spec, edits=edits), EventKind.DEVICE_CHANGED, by, command.reason)


_TOLD: dict[type[DeviceCommand], EventKind] = {
    DrainDevice: EventKind.DEVICE_DRAINED,
    TakeDevice: EventKind.DEVICE_TAKEN,
    HandOverDevice: EventKind.DEVICE_TAKEN,
    QuarantineDevice: EventKind.DEVICE_QUARANTINED,
    GiveBackDevice: EventKind.DEVICE_GIVEN_BACK,
}


# --- presence and health ----------------------------------------------------------------------------------------------


def plan_serving(
    node: str, names: Sequence[str], known: Known, *, nodes: Collection[str], now: datetime
) -> tuple[list[str], list[Change]]:
    """The devices that `node` serves of these, and those among them that it did not serve before. `nodes` are all that
    are known."""
    if node not in nodes:
        return [], []
    wanted = [known[name] for name in dict.fromkeys(names) if name in known]
    served = [device for device in wanted if device.node == node or device.node not in nodes]
    taken = [
        Change(msgspec.structs.replace(device, node=node, health=_down(device.health, now, NOT_CHECKED)))
        for device in served
        if device.node != node
    ]
    return [device.spec.name for device in served], taken


def plan_release(devices: Iterable[StoredDevice], *, now: datetime) -> list[Change]:
    """What becomes of devices that their node lets go of."""
    return [
        Change(
            msgspec.structs.replace(device, node="", health=_down(device.health, now, NOT_SERVED)),
            EventKind.DEVICE_DOWN if device.health.is_up else None,
            code=NOT_SERVED,
        )
        for device in devices
    ]


def _down(health: DeviceHealth, now: datetime, reason: str) -> DeviceHealth:
    """Down, since it went down."""
    since = now if health.is_up or health.since is None else health.since
    return DeviceHealth(since=since, reason=reason, beat_at=health.beat_at)


def plan_reports(node: str, reports: Sequence[DeviceReport], known: Known) -> tuple[list[str], list[Change]]:
    """The devices that `node` does not serve, and what is to be written of the others. Of several reports of a device
    the last one counts."""
    unserved, changes = [], []
    for report in {report.name: report for report in reports}.values():
        device = known.get(report.name)
        if device is None or device.node != node:
            unserved.append(report.name)
            continue
        change = Change(msgspec.structs.replace(device, health=report.health))
        if report.health.is_up != device.health.is_up:
            kind = EventKind.DEVICE_UP if report.health.is_up else EventKind.DEVICE_DOWN
            change = Change(change.device, kind, code="" if report.health.is_up else report.health.reason)
        changes.append(change)
    return unserved, changes
