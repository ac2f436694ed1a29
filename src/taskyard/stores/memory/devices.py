"""Devices in memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from taskyard.errors import DeviceBusy
from taskyard.model.audit import AuditEntry
from taskyard.model.device import (
    DeviceCommand,
    DeviceRun,
    DeviceSpec,
    DeviceStatus,
    QuarantinedAccount,
    RunFilter,
    RunTally,
    TakeDevice,
)
from taskyard.model.event import EventDetail, EventKind
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, TaskRecord
from taskyard.ports.device import DeviceReport
from taskyard.stores.devices import (
    Change,
    Occupation,
    StoredDevice,
    account_detail,
    device_detail,
    get_device,
    make_status,
    plan_add,
    plan_command,
    plan_definitions,
    plan_release,
    plan_reports,
    plan_serving,
    shown_first,
)
from taskyard.stores.memory.tasks import Tasks

if TYPE_CHECKING:
    from taskyard.stores.memory.core import MemoryCore

AccountKey = tuple[str, str, str]
"""A pool, an account and a consumer."""

Tell = Callable[[EventKind, str, str, datetime, EventDetail], None]
"""Tells of a kind, a queue and a consumer."""


class DeviceBook:
    """The devices and the quarantined accounts."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.known: dict[str, StoredDevice] = {}
        self.accounts: dict[AccountKey, QuarantinedAccount] = {}
        self.stamp = 0

    def write(self, changes: Iterable[Change], now: datetime, *, is_stamped: bool = True) -> None:
        for change in changes:
            device = change.device
            self.known[device.spec.name] = device
            self.stamp += is_stamped
            if change.kind is not None:
                self._tell(change.kind, device.spec.pool, "", now, change.detail)

    def remove(self, device: StoredDevice, by: str, now: datetime) -> None:
        del self.known[device.spec.name]
        self.stamp += 1
        detail = device_detail(device.spec.name, actor=by)
        self._tell(EventKind.DEVICE_REMOVED, device.spec.pool, "", now, detail)

    def release(self, node: str, names: Sequence[str] | None, now: datetime) -> None:
        """The node lets go of these devices, or of all."""
        asked = self.known if names is None else names
        served = [self.known[name] for name in asked if name in self.known and self.known[name].node == node]
        self.write(plan_release(served, now=now), now)

    def quarantine(self, quarantined: QuarantinedAccount, now: datetime) -> bool:
        """Whether it was not quarantined yet."""
        key = (quarantined.pool, quarantined.account, quarantined.consumer)
        if key in self.accounts:
            return False
        self.accounts[key] = quarantined
        self._account_changed(EventKind.ACCOUNT_QUARANTINED, quarantined, quarantined.quarantined.actor, now)
        return True

    def release_account(self, pool: str, account: str, consumer: str | None, by: str, now: datetime) -> int:
        released = [
            key for key in self.accounts if key[:2] == (pool, account) and (consumer is None or key[2] == consumer)
        ]
        for key in sorted(released):
            self._account_changed(EventKind.ACCOUNT_RELEASED, self.accounts.pop(key), by, now)
        return len(released)

    def _account_changed(self, kind: EventKind, account: QuarantinedAccount, by: str, now: datetime) -> None:
        self.stamp += 1
        self._tell(kind, account.pool, account.consumer, now, account_detail(account.account, by))

    def list_accounts(self, pool: str | None) -> list[QuarantinedAccount]:
        return [self.accounts[key] for key in sorted(self.accounts) if pool in (None, key[0])]


class DeviceVerbs:
    """The part of the store that keeps devices."""

    _core: MemoryCore

    def _tell(self) -> None:
        raise NotImplementedError

    async def device_stamp(self) -> int:
        return self._core.devices.stamp

    async def list_devices(self, pool: str | None = None) -> list[DeviceStatus]:
        return self._list(lambda device: pool in (None, device.spec.pool))

    def _list(self, wanted: Callable[[StoredDevice], bool]) -> list[DeviceStatus]:
        return list_statuses(filter(wanted, self._core.devices.known.values()), self._core)

    def _status(self, device: StoredDevice) -> DeviceStatus:
        (status,) = list_statuses([device], self._core)
        return status

    async def add_device(self, spec: DeviceSpec, *, by: str, audit: AuditEntry | None = None) -> DeviceStatus:
        now = self._core.now()
        self._change([plan_add(spec, self._core.devices.known, by=by, now=now)], now, audit)
        return self._status(self._core.devices.known[spec.name])

    async def define_devices(self, specs: Sequence[DeviceSpec], *, by: str) -> list[DeviceStatus]:
        now = self._core.now()
        self._change(plan_definitions(specs, self._core.devices.known, by=by, now=now), now, None)
        names = {spec.name for spec in specs}
        found = {status.name: status for status in self._list(lambda device: device.spec.name in names)}
        return [found[spec.name] for spec in specs]

    async def command_device(
        self, name: str, command: DeviceCommand, *, by: str, audit: AuditEntry | None = None
    ) -> DeviceStatus:
        now = self._core.now()
        is_busy = isinstance(command, TakeDevice) and name in _find_busy(self._core)
        change = plan_command(name, command, self._core.devices.known, by=by, now=now, is_busy=is_busy)
        self._change([] if change is None else [change], now, audit)
        return self._status(self._core.devices.known[name])

    def _change(self, changes: Sequence[Change], now: datetime, audit: AuditEntry | None) -> None:
        self._core.devices.write(changes, now)
        self._core.audit.note(audit, 1, len(changes))
        self._tell()

    async def remove_device(
        self, name: str, *, force: bool = False, by: str = "", audit: AuditEntry | None = None
    ) -> None:
        device = get_device(self._core.devices.known, name)
        if not force and (busy := _find_busy(self._core).get(name)) is not None:
            raise DeviceBusy(name, busy.task)
        self._core.devices.remove(device, by, self._core.now())
        self._core.audit.note(audit, 1, 1)
        self._tell()

    async def serve_devices(self, node: str, names: Sequence[str]) -> list[str]:
        now, book = self._core.now(), self._core.devices
        nodes = {status.node.incarnation for status in self._core.list_nodes()}
        served, taken = plan_serving(node, names, book.known, nodes=nodes, now=now)
        book.write(taken, now)
        return served

    async def unserve_devices(self, node: str, names: Sequence[str]) -> None:
        self._core.devices.release(node, names, self._core.now())
        self._tell()

    async def report_devices(self, node: str, reports: Sequence[DeviceReport]) -> list[str]:
        unserved, changes = plan_reports(node, reports, self._core.devices.known)
        self._core.devices.write(changes, self._core.now(), is_stamped=False)
        self._tell()
        return unserved

    async def list_quarantined_accounts(self, pool: str | None = None) -> list[QuarantinedAccount]:
        return self._core.devices.list_accounts(pool)

    async def quarantine_account(self, quarantined: QuarantinedAccount, *, audit: AuditEntry | None = None) -> None:
        is_new = self._core.devices.quarantine(quarantined, self._core.now())
        self._core.audit.note(audit, 1, int(is_new))
        self._tell()

    async def release_account(
        self, pool: str, account: str, consumer: str | None, *, by: str, audit: AuditEntry | None = None
    ) -> int:
        released = self._core.devices.release_account(pool, account, consumer, by, self._core.now())
        self._core.audit.note(audit, released, released)
        self._tell()
        return released

    async def list_device_runs(
        self, where: RunFilter, *, limit: int = 100, before: tuple[int, int] | None = None
    ) -> list[tuple[tuple[int, int], DeviceRun]]:
        runs = (
            ((run.token, record.id), run, record)
            for record, run in _runs(self._core, where)
            if before is None or (run.token, record.id) < before
        )
        newest = heapq.nlargest(limit, runs, key=lambda one: one[0])
        return [(place, _device_run(run, record)) for place, run, record in newest]

    async def tally_device_runs(self, where: RunFilter, *, by_account: bool = False) -> list[RunTally]:
        tallies: dict[str, _Tally] = {}
        for record, run in _runs(self._core, where):
            name = record.key if by_account else run.device
            if name is not None and run.finished_at is not None and not _was_given_back(run):
                tallies.setdefault(name, _Tally()).count(run)
        return [tally.made(name) for name, tally in sorted(tallies.items())]


def list_statuses(devices: Iterable[StoredDevice], tasks: Tasks) -> list[DeviceStatus]:
    """The devices as they are now, in the order in which they are shown."""
    busy = _find_busy(tasks)
    statuses = [
        make_status(
            device,
            node_name="" if (node := tasks.find_node(device.node)) is None else node.name,
            busy=busy.get(device.spec.name),
        )
        for device in devices
    ]
    return sorted(statuses, key=shown_first)


def _find_busy(tasks: Tasks) -> dict[str, Occupation]:
    """By device."""
    return {
        record.device: Occupation(record.uuid, record.key or "", record.started_at)
        for record in tasks.running_records()
        if record.device is not None and record.started_at is not None
    }


def _runs(core: MemoryCore, where: RunFilter) -> Iterator[tuple[TaskRecord, Attempt]]:
    """The attempts on devices that match."""
    for record, run in core.all_runs() if where.account is None else core.device_runs(where.account):
        if (
            run.device is not None
            and where.pool in (None, record.queue)
            and where.device in (None, run.device)
            and where.account in (None, record.key)
            and where.consumer in (None, record.consumer)
            and (where.since is None or run.started_at >= where.since)
        ):
            yield record, run


def _device_run(run: Attempt, record: TaskRecord) -> DeviceRun:
    return DeviceRun(
        device=run.device or "",
        account=record.key or "",
        consumer=record.consumer,
        task=record.uuid,
        attempt=run.attempt,
        started_at=run.started_at,
        finished_at=run.finished_at,
        outcome=str(run.state),
        error="" if run.error is None else run.error.text,
    )


def _was_given_back(run: Attempt) -> bool:
    """An attempt that was cut short through no fault of device or node has no error."""
    return run.state is TaskState.INTERRUPTED and run.error is None


class _Tally:
    """The runs of one device or account as they are counted."""

    def __init__(self) -> None:
        self._counts: dict[TaskState, int] = {}
        self._busy_s = 0.0
        self._last_at: datetime | None = None

    def count(self, run: Attempt) -> None:
        assert run.finished_at is not None
        self._counts[run.state] = self._counts.get(run.state, 0) + 1
        self._busy_s += (run.finished_at - run.started_at).total_seconds()
        self._last_at = run.finished_at if self._last_at is None else max(self._last_at, run.finished_at)

    def made(self, name: str) -> RunTally:
        counts = self._counts
        return RunTally(
            name=name,
            completed=counts.get(TaskState.COMPLETED, 0),
            failed=counts.get(TaskState.FAILED, 0) + counts.get(TaskState.RETRYING, 0),
            interrupted=counts.get(TaskState.INTERRUPTED, 0),
            canceled=counts.get(TaskState.CANCELED, 0),
            busy_s=self._busy_s,
            last_at=self._last_at,
        )
