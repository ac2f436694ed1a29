"""Requests and documents of devices."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from taskyard.application.documents import Document, ErrorDocument, Request
from taskyard.application.event_documents import EventDocument
from taskyard.model import device as model
from taskyard.model.device import DeviceState
from taskyard.model.execution import Progress
from taskyard.model.given import check_reason, check_timeout
from taskyard.model.notes import AuditStamp

# --- requests ---------------------------------------------------------------------------------------------------------


class DeviceRequest(Request, frozen=True, kw_only=True):
    """A device to add to a pool. Without a `number` it gets the next one of the pool. `address` is where it is: the
    serial of a phone. `settings` are those of the adapter; `settings_text` has the text of settings that were typed:
    where the adapter wants a string, `health=true` is one."""

    name: str
    pool: str
    adapter: str
    number: int | None = None
    address: str = ""
    settings: dict[str, Any] = {}
    settings_text: dict[str, str] = {}
    labels: dict[str, str] = {}
    host: str = ""


class DeviceChange(Request, frozen=True, kw_only=True):
    """What to change of a device; None leaves a part as it is. Settings that are not named stay; one that is null is
    removed. `settings_text` is as in a `DeviceRequest`."""

    address: str | None = None
    settings: dict[str, Any] | None = None
    settings_text: dict[str, str] = {}
    host: str | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        check_reason(self.reason)


class _Order(Request, frozen=True, kw_only=True):
    reason: str = ""

    def __post_init__(self) -> None:
        check_reason(self.reason)


class DrainDevice(_Order, tag="drain", frozen=True, kw_only=True):
    """Give it no new task; what runs on it goes on."""


class TakeDevice(_Order, tag="take", frozen=True, kw_only=True):
    """Use it by hand, for so many seconds or until it is given back; what runs on it ends first."""

    for_s: float | None = None

    def __post_init__(self) -> None:
        check_reason(self.reason)
        if self.for_s is not None:
            check_timeout(self.for_s, field="for_s")


class QuarantineDevice(_Order, tag="quarantine", frozen=True, kw_only=True):
    """Set it aside until it is given back."""


class GiveBackDevice(_Order, tag="give_back", frozen=True, kw_only=True):
    """Take back every order: it is no longer drained, taken or quarantined."""


DeviceCommand = DrainDevice | TakeDevice | QuarantineDevice | GiveBackDevice
"""What a person asks of a device."""


class RunQuery(Request, frozen=True, kw_only=True):
    """Which runs on devices; None means any. `account` is its id, a whole number or a text. `since`: only those that
    started then or later."""

    pool: str | None = None
    devices: tuple[str, ...] = ()
    account: int | str | None = None
    consumer: str | None = None
    since: datetime | None = None


# --- documents --------------------------------------------------------------------------------------------------------


class OrdersDocument(Document, frozen=True, kw_only=True):
    """What people, or the recovery of the device, have said of it and not taken back."""

    drained: AuditStamp | None = None
    taken: AuditStamp | None = None
    taken_until: datetime | None = None
    taken_for_s: float | None = None
    """Until the task that still runs there has ended; then `taken_until` says when the time is over."""
    quarantined: AuditStamp | None = None


class DeviceDocument(Document, frozen=True, kw_only=True):
    """A device. `since` is when its `state` began, if that is known; `reason`, `by` and `until` are why, who asked for
    it and when it ends by itself. `step` is what is done now to bring a device back that is down.

    `node` is the incarnation of the node that serves it, `node_name` the name of that node; `beat_at` is when a
    device that is down has answered last; null while it answers. `task` runs on it since `busy_since`: a task of
    `consumer` for `account`. `takes_tasks`: a task may start on it once it is not busy. `from_code`: a program defines
    it whenever it starts."""

    name: str
    number: int
    pool: str
    adapter: str
    address: str
    settings: dict[str, Any]
    labels: dict[str, str]
    host: str
    from_code: bool
    state: DeviceState
    since: datetime | None
    reason: str
    by: str
    until: datetime | None
    step: str
    takes_tasks: bool
    orders: OrdersDocument
    node: str
    node_name: str
    beat_at: datetime | None
    task: str | None
    consumer: str | None
    account: int | str | None
    busy_since: datetime | None
    progress: Progress | None
    version: int


class DeviceRunDocument(Document, frozen=True, kw_only=True):
    """An attempt of a task on a device. `outcome` is the state in which it ended, `running` while it has not."""

    device: str
    account: int | str | None
    consumer: str
    task: str
    attempt: int
    started_at: datetime
    finished_at: datetime | None
    duration_s: float | None
    outcome: str
    error: str


class RunTallyDocument(Document, frozen=True, kw_only=True):
    """How the runs of one device, or of one account, ended. `interrupted` are those during which the device or the node
    was lost. `success_rate` is the share of those that completed; canceled ones are left out, and it is null without
    any."""

    device: str | None
    account: int | str | None
    completed: int
    failed: int
    interrupted: int
    canceled: int
    success_rate: float | None
    busy_s: float
    last_at: datetime | None


class DeviceDetail(DeviceDocument, frozen=True, kw_only=True):
    """Everything about one device: how its runs ended, as long as their tasks are kept, and the last ones."""

    tally: RunTallyDocument
    runs: tuple[DeviceRunDocument, ...]


class DeviceHistory(Document, frozen=True, kw_only=True):
    """Runs on devices, newest first; the next page begins before `next`, null on the last one. `devices` and `accounts`
    add them all up, those with the lowest success rate first; so many more are left out."""

    runs: tuple[DeviceRunDocument, ...]
    next: str | None
    devices: tuple[RunTallyDocument, ...]
    accounts: tuple[RunTallyDocument, ...]
    more_devices: int = 0
    more_accounts: int = 0


class DeviceReceipt(Document, frozen=True, kw_only=True):
    """What became of a command on one device: the device after it, unless it was removed, or the error that kept it
    from being carried out. `changed` is false if the device was already as was asked."""

    name: str
    ok: bool
    changed: bool = False
    device: DeviceDocument | None = None
    error: ErrorDocument | None = None


class QuarantinedAccountDocument(Document, frozen=True, kw_only=True):
    """Tasks of this account and consumer have failed so often in a row that no more are taken."""

    pool: str
    account: int | str
    consumer: str
    failures: int
    quarantined: AuditStamp


class ReleaseReceipt(Document, frozen=True, kw_only=True):
    """The pairs of account and consumer of which tasks are taken again."""

    released: tuple[QuarantinedAccountDocument, ...]


class PoolDocument(Document, frozen=True, kw_only=True):
    """A pool of devices: how many are in each state, how many tasks are queued, wait for something else or run. `rate`
    is how many tasks have finished per second in the last minute, `success_rate` the share of the runs since
    `success_since` that completed, null without any. `misfit` is the first task of the line if no device has the labels
    that it requires: the others wait behind it."""

    name: str
    devices: int
    states: dict[DeviceState, int]
    queued: int
    waiting: int
    running: int
    rate: float
    success_rate: float | None
    success_since: datetime | None
    misfit: str | None = None


class DeviceOverview(Document, frozen=True, kw_only=True):
    """What the devices of a store, or of one pool, are doing. `events` are the last that are about them or their tasks,
    newest first. While the store does not answer, `away_since` is set, `away_reason` says why, and the rest is as it
    was then."""

    at: datetime
    pools: tuple[PoolDocument, ...] = ()
    devices: tuple[DeviceDocument, ...] = ()
    events: tuple[EventDocument, ...] = ()
    away_since: datetime | None = None
    away_reason: str = ""


# --- from values of the model -----------------------------------------------------------------------------------------


def account_id(key: str | None) -> int | str | None:
    """The account that a key stands for."""
    return None if not key else model.read_account(key)


def run_document(run: model.DeviceRun) -> DeviceRunDocument:
    took_s = None if run.finished_at is None else max(0.0, (run.finished_at - run.started_at).total_seconds())
    return DeviceRunDocument(
        device=run.device,
        account=account_id(run.account),
        consumer=run.consumer,
        task=run.task,
        attempt=run.attempt,
        started_at=run.started_at,
        finished_at=run.finished_at,
        duration_s=took_s,
        outcome=run.outcome,
        error=run.error,
    )


def tally_document(tally: model.RunTally, *, by_account: bool = False) -> RunTallyDocument:
    return RunTallyDocument(
        device=None if by_account else tally.name,
        account=account_id(tally.name) if by_account else None,
        completed=tally.completed,
        failed=tally.failed,
        interrupted=tally.interrupted,
        canceled=tally.canceled,
        success_rate=tally.success_rate,
        busy_s=tally.busy_s,
        last_at=tally.last_at,
    )


def account_document(found: model.QuarantinedAccount) -> QuarantinedAccountDocument:
    return QuarantinedAccountDocument(
        pool=found.pool,
        account=model.read_account(found.account),
        consumer=found.consumer,
        failures=found.failures,
        quarantined=found.quarantined,
    )
