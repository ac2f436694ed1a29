"""Devices: what is stored of one, what people ask of it, and the state that follows. Pure.

Four facts, each with an owner and an end. *Presence*: one node serves the device, until it lets go of it or dies.
*Health*: that node reports whether the device answers. *Busy*: a task runs on it, until that is settled. *Orders* of
people, or of the recovery ladder: drained, taken by hand, quarantined, until somebody takes that back.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec

from taskyard.model.dedupe import make_slot
from taskyard.model.notes import AuditStamp
from taskyard.model.task import DedupeScope, TaskRecord


class DeviceState(StrEnum):
    """What a device does now. Only an idle one gets a task."""

    IDLE = "idle"
    BUSY = "busy"
    DOWN = "down"
    """It does not answer, or no node serves it."""
    DRAINING = "draining"
    """It gets no new task; what runs on it goes on."""
    TAKEN = "taken"
    """A person uses it by hand."""
    QUARANTINED = "quarantined"
    """Nothing made it answer again, or a person has set it aside."""


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What defines a device. `name` is unique in a store; tasks and attempts keep it. `number` is the `emulator_id` of
    the source design, unique in its pool. `adapter` says how it is reached ("adb", "simulated", "command", or the name
    of one that a pool was given), `address` where, which is unique for its adapter unless it is empty: the serial of a
    phone. `settings` are those of the adapter. `labels` are what tasks may require. `host` is the name of the only host
    that serves it; any may if it is empty. `from_code`: a program defines it whenever it starts."""

    pool: str
    name: str
    number: int
    adapter: str
    address: str = ""
    settings: dict[str, Any] = {}
    labels: dict[str, str] = {}
    host: str = ""
    from_code: bool = False


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What the node that serves a device says of it. `reason` is why it is down. `step` is what the recovery ladder
    does about it now, such as "reconnect"."""

    is_up: bool = False
    since: datetime | None = None
    reason: str = ""
    step: str = ""
    beat_at: datetime | None = None
    """When it last answered, as of the last report; nothing is reported for a heartbeat alone."""


NOT_SERVED = "no node serves it"
"""Why a device is down that no node has connected to."""

NOT_CHECKED = "it has not answered yet"
"""Why a device is down until the node that serves it now has checked it."""

CODE_GOES_ON = "code of an ended run still uses it"
"""Why a device is down whose last run was given up, while its code has not ended: nobody else may use it yet."""


class DeviceOrders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people, or the ladder, have said of a device, and not taken back. A person who has `taken` it keeps it until
    `taken_until`, if there is such a time. While a task still runs on it, the time has not begun, and `taken_for_s` is
    how long it will be."""

    drained: AuditStamp | None = None
    taken: AuditStamp | None = None
    taken_until: datetime | None = None
    taken_for_s: float | None = None
    quarantined: AuditStamp | None = None

    def at(self, now: datetime) -> DeviceOrders:
        """The same without what has run out."""
        if self.taken_until is None or now < self.taken_until:
            return self
        return msgspec.structs.replace(self, taken=None, taken_until=None)


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device as a store knows it. `node` is the incarnation of the living node that serves it, `node_name` the name
    of that; both are empty if none does. `task` is the task that runs on it, since `busy_since`. `version` changes with
    its spec and its orders."""

    spec: DeviceSpec
    orders: DeviceOrders = DeviceOrders()
    health: DeviceHealth = DeviceHealth()
    version: int = 1
    node: str = ""
    node_name: str = ""
    task: str = ""
    account: str = ""
    """The key of that task."""
    busy_since: datetime | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def state_at(self, now: datetime) -> DeviceState:
        """The state to show: what a person has said goes before what the device does, save that one that is down is
        never shown as draining or idle."""
        orders = self.orders.at(now)
        if orders.quarantined is not None:
            return DeviceState.QUARANTINED
        if orders.taken is not None and not self.task and self.health.reason != CODE_GOES_ON:
            return DeviceState.TAKEN
        if not self.node or not self.health.is_up:
            return DeviceState.DOWN
        if orders.drained is not None or orders.taken is not None:
            return DeviceState.DRAINING
        return DeviceState.BUSY if self.task else DeviceState.IDLE

    def takes_tasks_at(self, now: datetime) -> bool:
        """Whether a task may start on it when it is not busy."""
        return self.state_at(now) in (DeviceState.IDLE, DeviceState.BUSY)


# --- what is asked of a device ----------------------------------------------------------------------------------------


class DrainDevice(msgspec.Struct, frozen=True, tag="drain"):
    """Give it no new task."""

    reason: str = ""


class TakeDevice(msgspec.Struct, frozen=True, tag="take"):
    """A person wants to use it by hand, for so many seconds, or until they give it back. What runs on it goes on; it is
    theirs when that has ended, and the time begins then."""

    reason: str = ""
    for_s: float | None = None


class HandOverDevice(msgspec.Struct, frozen=True, tag="hand_over"):
    """The run on a device that is taken has ended: the time of the person begins. The node that serves it says so."""

    reason: str = ""


class QuarantineDevice(msgspec.Struct, frozen=True, tag="quarantine"):
    """Set it aside until somebody gives it back."""

    reason: str = ""


class GiveBackDevice(msgspec.Struct, frozen=True, tag="give_back"):
    """Take back every order: it is no longer drained, taken or quarantined. It gets a task when it is up."""

    reason: str = ""


class EditDevice(msgspec.Struct, frozen=True, tag="edit"):
    """Change its definition; None leaves a part as it is. A label with an empty text is removed, the others stay."""

    labels: dict[str, str] | None = None
    address: str | None = None
    settings: dict[str, Any] | None = None
    host: str | None = None
    reason: str = ""


DeviceCommand = DrainDevice | TakeDevice | HandOverDevice | QuarantineDevice | GiveBackDevice | EditDevice


def order_device(
    orders: DeviceOrders, command: DeviceCommand, *, by: str, now: datetime, is_busy: bool = False
) -> DeviceOrders:
    """What a command makes of the orders of a device, on which a task runs if it `is_busy`. A command that changes
    nothing answers with `orders` itself, so that the first to say it is remembered."""
    stamp = AuditStamp(by, now, command.reason)
    match command:
        case DrainDevice():
            return orders if orders.drained else msgspec.structs.replace(orders, drained=stamp)
        case TakeDevice(for_s=for_s):
            until = None if for_s is None or is_busy else now + timedelta(seconds=for_s)
            waits_s = for_s if is_busy else None
            return msgspec.structs.replace(orders, taken=stamp, taken_until=until, taken_for_s=waits_s)
        case HandOverDevice():
            if orders.taken_for_s is None:
                return orders
            until = now + timedelta(seconds=orders.taken_for_s)
            return msgspec.structs.replace(orders, taken_until=until, taken_for_s=None)
        case QuarantineDevice():
            return orders if orders.quarantined else msgspec.structs.replace(orders, quarantined=stamp)
        case GiveBackDevice():
            return orders if orders == DeviceOrders() else DeviceOrders()
        case EditDevice():
            return orders


def edit_device(spec: DeviceSpec, command: EditDevice) -> DeviceSpec:
    """The definition after an edit."""
    labels = {**spec.labels, **(command.labels or {})}
    return msgspec.structs.replace(
        spec,
        labels={name: value for name, value in labels.items() if value},
        address=spec.address if command.address is None else command.address,
        settings=spec.settings if command.settings is None else command.settings,
        host=spec.host if command.host is None else command.host,
    )


class DeviceEdits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a person has changed of a device that a program defines: the next start of the program leaves it as it is.
    `labels` by name, an empty text stands for one that was removed; the others say which parts were changed."""

    labels: dict[str, str] = {}
    has_settings: bool = False
    has_address: bool = False
    has_host: bool = False

    def after(self, command: EditDevice) -> DeviceEdits:
        """The same with one more edit."""
        return DeviceEdits(
            labels={**self.labels, **(command.labels or {})},
            has_settings=self.has_settings or command.settings is not None,
            has_address=self.has_address or command.address is not None,
            has_host=self.has_host or command.host is not None,
        )

    def applied(self, defined: DeviceSpec, stored: DeviceSpec) -> DeviceSpec:
        """The definition of the program, with what a person has edited of the stored one."""
        labels = {**defined.labels, **self.labels}
        return msgspec.structs.replace(
            defined,
            labels={name: value for name, value in labels.items() if value},
            settings=stored.settings if self.has_settings else defined.settings,
            address=stored.address if self.has_address else defined.address,
            host=stored.host if self.has_host else defined.host,
        )


# --- accounts ---------------------------------------------------------------------------------------------------------


_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


def account_key(account_id: int | str) -> str:
    """The key of the tasks of an account. `7` and `"7"` are two accounts, and `read_account` tells them apart."""
    if isinstance(account_id, int):
        return str(account_id)
    is_plain = not account_id.startswith('"') and not _is_int(account_id)
    return account_id if is_plain else msgspec.json.encode(account_id).decode()


def read_account(key: str) -> int | str:
    """The account that a key stands for."""
    if _is_int(key):
        return int(key)
    if key.startswith('"'):
        with suppress(msgspec.DecodeError):  # a key that stands for no account
            return msgspec.json.decode(key, type=str)
    return key


def set_account(record: TaskRecord, argument: str) -> str | None:
    """Give a task the key of its account, which is this argument. It stands for the work of its consumer for that
    account, and is a duplicate as well while any task of the account runs. The key, None if it has no account."""
    account = msgspec.json.decode(record.args).get(argument)
    if account is None:
        return None
    record.key = key = account_key(account["account_id"] if isinstance(account, dict) else account)
    record.dedupe_slot, record.dedupe_scope = make_slot(record.consumer, record.args, key), DedupeScope.KEY_IDLE
    return key


def _is_int(text: str) -> bool:
    """Whether this is how an integer is written."""
    return _INTEGER.fullmatch(text) is not None


class QuarantinedAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of this account and consumer have failed so often in a row that no more are taken, until somebody releases
    it. The tasks of other accounts, and of other consumers, go on."""

    pool: str
    account: str
    """The key of its tasks."""
    consumer: str
    failures: int
    quarantined: AuditStamp


# --- history ----------------------------------------------------------------------------------------------------------


class DeviceRun(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a task on a device, for the history."""

    device: str
    account: str
    """The key of the task; empty without one."""
    consumer: str
    task: str
    attempt: int
    started_at: datetime
    finished_at: datetime | None
    outcome: str
    """The state that the attempt ended in; "running" while it has not."""
    error: str = ""


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs on devices; None means any. A pool is a queue of the same name. `since` asks for those that started
    then or later."""

    pool: str | None = None
    device: str | None = None
    account: str | None = None
    consumer: str | None = None
    since: datetime | None = None


class RunTally(msgspec.Struct, frozen=True, kw_only=True):
    """How the runs of one device, or of one account, ended. Those that were given back, because a node stopped, are not
    counted."""

    name: str
    completed: int = 0
    failed: int = 0
    interrupted: int = 0
    """Those during which the device or the node was lost."""
    canceled: int = 0
    busy_s: float = 0.0
    last_at: datetime | None = None

    @property
    def success_rate(self) -> float | None:
        """The share of those that completed among those that completed, failed or were interrupted."""
        total = self.completed + self.failed + self.interrupted
        return None if total == 0 else self.completed / total
