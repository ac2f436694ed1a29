"""Devices in the SQLite store: part of a transaction, what is read, and the port over both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import apsw
import msgspec

from taskyard.errors import DeviceBusy
from taskyard.model.audit import AuditEntry
from taskyard.model.device import (
    DeviceCommand,
    DeviceEdits,
    DeviceHealth,
    DeviceOrders,
    DeviceRun,
    DeviceSpec,
    DeviceStatus,
    EditDevice,
    QuarantinedAccount,
    RunFilter,
    RunTally,
    TakeDevice,
)
from taskyard.model.event import EventKind
from taskyard.model.notes import AuditStamp
from taskyard.ports.clock import Clock
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
)
from taskyard.stores.records import from_us, to_document, to_us
from taskyard.stores.sqlite.audit import note
from taskyard.stores.sqlite.device_runs import list_runs, tally_runs

if TYPE_CHECKING:
    from taskyard.stores.sqlite.core import SqliteCore
    from taskyard.stores.sqlite.reader import SqliteReader
    from taskyard.stores.sqlite.transaction import Transaction

T = TypeVar("T")

_COLUMNS = "name, definition, edits, orders, health, version, node"
_ACCOUNT = "pool, account, consumer, failures, quarantined"
_NAMED = "name IN (SELECT value FROM json_each(?))"

_read_spec, _read_health = msgspec.json.Decoder(DeviceSpec), msgspec.json.Decoder(DeviceHealth)
_read_edits, _read_orders = msgspec.json.Decoder(DeviceEdits), msgspec.json.Decoder(DeviceOrders)
_read_stamp = msgspec.json.Decoder(AuditStamp)


# --- in a transaction -------------------------------------------------------------------------------------------------


class DeviceWrites:
    """What a transaction can do with devices."""

    def __init__(self, transaction: Transaction, conn: apsw.Connection, clock: Clock) -> None:
        self._transaction, self._conn, self._clock = transaction, conn, clock

    def add(self, spec: DeviceSpec, by: str, audit: AuditEntry | None) -> DeviceStatus:
        self._write([plan_add(spec, _read_known(self._conn), by=by, now=self._clock.now())])
        note(self._conn, audit, 1, 1)
        return self._status(spec.name)

    def define(self, specs: Sequence[DeviceSpec], by: str) -> list[DeviceStatus]:
        self._write(plan_definitions(specs, _read_known(self._conn), by=by, now=self._clock.now()))
        found = {status.name: status for status in list_devices(self._conn)}
        return [found[spec.name] for spec in specs]

    def command(self, name: str, command: DeviceCommand, by: str, audit: AuditEntry | None) -> DeviceStatus:
        known = _read_known(self._conn, None if isinstance(command, EditDevice) else [name])
        is_busy = isinstance(command, TakeDevice) and name in _read_busy(self._conn)
        change = plan_command(name, command, known, by=by, now=self._clock.now(), is_busy=is_busy)
        if change is not None:
            self._write([change])
            note(self._conn, audit, 1, 1)
        return self._status(name)

    def _status(self, name: str) -> DeviceStatus:
        (status,) = list_devices(self._conn, name=name)
        return status

    def remove(self, name: str, force: bool, by: str, audit: AuditEntry | None) -> None:
        device = get_device(_read_known(self._conn, [name]), name)
        if not force and (busy := _read_busy(self._conn).get(name)) is not None:
            raise DeviceBusy(name, busy.task)
        self._conn.execute("DELETE FROM device WHERE name = ?", (name,))
        self._tell(EventKind.DEVICE_REMOVED, device, by)
        self._changed()
        note(self._conn, audit, 1, 1)

    def serve(self, node: str, names: Sequence[str]) -> list[str]:
        rows: Any = self._conn.execute("SELECT incarnation FROM node")
        nodes, known = {incarnation for (incarnation,) in rows}, _read_known(self._conn, names)
        served, taken = plan_serving(node, names, known, nodes=nodes, now=self._clock.now())
        self._write(taken)
        return served

    def release(self, node: str, names: Sequence[str] | None) -> None:
        """The node lets go of these devices, or of all."""
        served = _select(self._conn, "node = ? AND node <> ''", (node,))
        released = [device for device in served if names is None or device.spec.name in names]
        self._write(plan_release(released, now=self._clock.now()))

    def report(self, node: str, reports: Sequence[DeviceReport]) -> list[str]:
        known = _read_known(self._conn, [report.name for report in reports])
        unserved, changes = plan_reports(node, reports, known)
        self._write(changes, is_stamped=False)
        return unserved

    def _write(self, changes: Sequence[Change], *, is_stamped: bool = True) -> None:
        if not changes:
            return
        # All old rows go first: devices may swap numbers or addresses.
        self._conn.executemany("DELETE FROM device WHERE name = ?", [(one.device.spec.name,) for one in changes])
        rows = [_to_row(change.device) for change in changes]
        self._conn.executemany(f"INSERT INTO device ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        for change in changes:
            if change.kind is not None:
                self._tell(change.kind, change.device, change.actor, change.code)
        if is_stamped:
            self._changed()

    def _tell(self, kind: EventKind, device: StoredDevice, actor: str, code: str = "") -> None:
        detail = device_detail(device.spec.name, actor=actor, code=code)
        self._transaction.tell_plainly(kind, device.spec.pool, "", to_us(self._clock.now()), detail)

    def _changed(self) -> None:
        self._conn.execute("UPDATE device_stamp SET n = n + 1")

    def quarantine(self, quarantined: QuarantinedAccount, audit: AuditEntry | None) -> None:
        row = *msgspec.structs.astuple(quarantined)[:-1], to_document(quarantined.quarantined)
        added: Any = self._conn.execute(
            f"INSERT INTO quarantined_account ({_ACCOUNT}) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1",
            row,
        ).get
        if added is not None:
            self._tell_of_accounts(EventKind.ACCOUNT_QUARANTINED, [quarantined], quarantined.quarantined.actor, audit)

    def release_account(self, pool: str, account: str, consumer: str | None, by: str, audit: AuditEntry | None) -> int:
        rows: Any = self._conn.execute(
            "DELETE FROM quarantined_account WHERE pool = ?1 AND account = ?2 AND (?3 IS NULL OR consumer = ?3) "
            f"RETURNING {_ACCOUNT}",
            (pool, account, consumer),
        ).fetchall()
        released = sorted(map(_to_account, rows), key=lambda one: one.consumer)
        if released:
            self._tell_of_accounts(EventKind.ACCOUNT_RELEASED, released, by, audit)
        return len(released)

    def _tell_of_accounts(
        self, kind: EventKind, accounts: Sequence[QuarantinedAccount], by: str, audit: AuditEntry | None
    ) -> None:
        at = to_us(self._clock.now())
        for one in accounts:
            self._transaction.tell_plainly(kind, one.pool, one.consumer, at, account_detail(one.account, by))
        self._changed()
        note(self._conn, audit, len(accounts), len(accounts))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_stamp(conn: apsw.Connection) -> int:
    stamp: Any = conn.execute("SELECT n FROM device_stamp").get
    return int(stamp)


def list_devices(
    conn: apsw.Connection, pools: Sequence[str] | None = None, name: str | None = None
) -> list[DeviceStatus]:
    rows: Any = conn.execute(
        f"SELECT {_COLUMNS}, coalesce((SELECT info ->> '$.name' FROM node WHERE incarnation = device.node), '') "
        "FROM device WHERE (?1 IS NULL OR pool IN (SELECT value FROM json_each(?1))) AND (?2 IS NULL OR name = ?2) "
        "ORDER BY pool, number, name",
        (None if pools is None else to_document(list(pools)), name),
    ).fetchall()
    busy = _read_busy(conn) if rows else {}
    return [make_status(_to_device(row), node_name=node_name, busy=busy.get(row[0])) for *row, node_name in rows]


def _read_busy(conn: apsw.Connection) -> dict[str, Occupation]:
    """By device: what runs is little, so that this needs no index of its own."""
    rows: Any = conn.execute(
        "SELECT device, uuid, key, started_at FROM task INDEXED BY task_running "
        "WHERE state = 'running' AND device IS NOT NULL"
    )
    return {device: Occupation(uuid, key or "", from_us(started_at)) for device, uuid, key, started_at in rows}


def _read_known(conn: apsw.Connection, names: Iterable[str] | None = None) -> dict[str, StoredDevice]:
    """All devices, or those of these names."""
    found = _select(conn) if names is None else _select(conn, _NAMED, (to_document(list(names)),))
    return {device.spec.name: device for device in found}


def _select(conn: apsw.Connection, where: str = "true", values: tuple[Any, ...] = ()) -> list[StoredDevice]:
    rows: Any = conn.execute(f"SELECT {_COLUMNS} FROM device WHERE {where}", values)
    return [_to_device(row) for row in rows.fetchall()]


def _to_row(device: StoredDevice) -> tuple[Any, ...]:
    documents = map(to_document, (device.spec, device.edits, device.orders, device.health))
    return device.spec.name, *documents, device.version, device.node


def _to_device(row: Sequence[Any]) -> StoredDevice:
    _, definition, edits, orders, health, version, node = row
    return StoredDevice(
        spec=_read_spec.decode(definition),
        edits=_read_edits.decode(edits),
        orders=_read_orders.decode(orders),
        health=_read_health.decode(health),
        version=version,
        node=node,
    )


def read_accounts(conn: apsw.Connection, pool: str | None = None) -> list[QuarantinedAccount]:
    rows: Any = conn.execute(
        f"SELECT {_ACCOUNT} FROM quarantined_account WHERE ?1 IS NULL OR pool = ?1 ORDER BY pool, account, consumer",
        (pool,),
    )
    return [_to_account(row) for row in rows]


def _to_account(row: Sequence[Any]) -> QuarantinedAccount:
    pool, account, consumer, failures, quarantined = row
    return QuarantinedAccount(
        pool=pool,
        account=account,
        consumer=consumer,
        failures=failures,
        quarantined=_read_stamp.decode(quarantined),
    )


# --- the port ---------------------------------------------------------------------------------------------------------


class DeviceVerbs:
    """The part of the store that keeps devices."""

    _core: SqliteCore
    _lister: SqliteReader

    @abstractmethod
    def _write(self, run: Callable[[], T], peek: Callable[[], T | None] | None = None) -> Awaitable[T]: ...

    @abstractmethod
    async def _look(self, run: Callable[[apsw.Connection], T]) -> T: ...

    @abstractmethod
    async def _read(self, run: Callable[[], T], *, people: bool = False) -> T: ...

    async def device_stamp(self) -> int:
        return await self._look(read_stamp)

    async def list_devices(self, pool: str | None = None) -> list[DeviceStatus]:
        return await self._look(partial(list_devices, pools=None if pool is None else [pool]))

    async def add_device(self, spec: DeviceSpec, *, by: str, audit: AuditEntry | None = None) -> DeviceStatus:
        return await self._write(partial(self._core.devices.add, spec, by, audit))

    async def define_devices(self, specs: Sequence[DeviceSpec], *, by: str) -> list[DeviceStatus]:
        return await self._write(partial(self._core.devices.define, specs, by))

    async def command_device(
        self, name: str, command: DeviceCommand, *, by: str, audit: AuditEntry | None = None
    ) -> DeviceStatus:
        return await self._write(partial(self._core.devices.command, name, command, by, audit))

    async def remove_device(
        self, name: str, *, force: bool = False, by: str = "", audit: AuditEntry | None = None
    ) -> None:
        await self._write(partial(self._core.devices.remove, name, force, by, audit))

    async def serve_devices(self, node: str, names: Sequence[str]) -> list[str]:
        return await self._write(partial(self._core.devices.serve, node, names))

    async def unserve_devices(self, node: str, names: Sequence[str]) -> None:
        await self._write(partial(self._core.devices.release, node, names))

    async def report_devices(self, node: str, reports: Sequence[DeviceReport]) -> list[str]:
        return await self._write(partial(self._core.devices.report, node, reports))

    async def list_quarantined_accounts(self, pool: str | None = None) -> list[QuarantinedAccount]:
        return await self._look(partial(read_accounts, pool=pool))

    async def quarantine_account(self, quarantined: QuarantinedAccount, *, audit: AuditEntry | None = None) -> None:
        await self._write(partial(self._core.devices.quarantine, quarantined, audit))

    async def release_account(
        self, pool: str, account: str, consumer: str | None, *, by: str, audit: AuditEntry | None = None
    ) -> int:
        return await self._write(partial(self._core.devices.release_account, pool, account, consumer, by, audit))

    async def list_device_runs(
        self, where: RunFilter, *, limit: int = 100, before: tuple[int, int] | None = None
    ) -> list[tuple[tuple[int, int], DeviceRun]]:
        read = partial(list_runs, where=where, limit=limit, before=before)
        return await self._read(partial(self._lister.look, read), people=True)

    async def tally_device_runs(self, where: RunFilter, *, by_account: bool = False) -> list[RunTally]:
        read = partial(tally_runs, where=where, by_account=by_account)
        return await self._read(partial(self._lister.look, read), people=True)
