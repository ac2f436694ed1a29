"""Devices in the PostgreSQL store.

What a command makes of devices is decided on what was read with the stamp, and written only if the stamp is still that
one. Who serves a device, and what is reported of it, is decided by the server alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from taskyard.errors import DeviceBusy, InvalidInput, UnknownDevice, quote
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
from taskyard.model.notes import AuditStamp
from taskyard.ports.clock import Clock
from taskyard.ports.device import DeviceReport
from taskyard.stores.devices import (
    Change,
    Known,
    Occupation,
    StoredDevice,
    account_detail,
    device_detail,
    make_status,
    plan_add,
    plan_command,
    plan_definitions,
    shown_first,
)
from taskyard.stores.postgres.audit import encode_entry
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.device_runs import list_runs, tally_runs
from taskyard.stores.postgres.errors import busy
from taskyard.stores.postgres.patience import TRIES, give_way
from taskyard.stores.postgres.rows import clean, to_text

_STAMP = "SELECT n FROM taskyard.device_stamp"
_DEVICES = (
    "SELECT definition, edits, orders, version, node, is_up, since, reason, step, beat_at FROM taskyard.device "
    "WHERE ($1::text[] IS NULL OR name = ANY ($1)) AND ($2::text[] IS NULL OR pool = ANY ($2))"
)
_BUSY = "SELECT device, uuid, key, started_at FROM taskyard.task WHERE state = 'running' AND device IS NOT NULL"
_NODES = "SELECT incarnation, info::json ->> 'name' AS name FROM taskyard.node"
_ACCOUNTS = (
    "SELECT pool, account, consumer, failures, quarantined FROM taskyard.quarantined_account "
    "WHERE $1::text IS NULL OR pool = $1 ORDER BY pool, account, consumer"
)
WRITE = "SELECT taskyard.write_devices_1($1, $2, $3, $4)"
REMOVE = "SELECT * FROM taskyard.remove_device_1($1, $2, $3, $4, $5)"
SERVE = "SELECT taskyard.serve_devices_1($1, $2, $3)"
UNSERVE = "SELECT taskyard.unserve_devices_1($1, $2, $3)"
REPORT = "SELECT taskyard.report_devices_1($1, $2, $3)"
QUARANTINE = "SELECT taskyard.quarantine_account_1($1, $2, $3, $4, $5, $6, $7, $8)"
RELEASE = "SELECT taskyard.release_account_1($1, $2, $3, $4, $5, $6)"

_read_spec, _read_edits = msgspec.json.Decoder(DeviceSpec), msgspec.json.Decoder(DeviceEdits)
_read_orders, _read_stamp = msgspec.json.Decoder(DeviceOrders), msgspec.json.Decoder(AuditStamp)


class DeviceVerbs:
    """The part of the store that keeps devices."""

    url: str
    _clock: Clock
    _db: Database

    async def device_stamp(self) -> int:
        stamp: int = await self._db.ask(lambda conn: conn.fetchval(_STAMP))
        return stamp

    async def list_devices(self, pool: str | None = None) -> list[DeviceStatus]:
        return await self._db.ask(partial(list_devices, pools=None if pool is None else [clean(pool)]))

    async def add_device(self, spec: DeviceSpec, *, by: str, audit: AuditEntry | None = None) -> DeviceStatus:
        _check_storable([spec])

        def plan(known: Known, now: datetime) -> list[Change]:
            return [plan_add(spec, known, by=by, now=now)]

        (status,) = await self._change(plan, [spec.name], audit)
        return status

    async def define_devices(self, specs: Sequence[DeviceSpec], *, by: str) -> list[DeviceStatus]:
        _check_storable(specs)

        def plan(known: Known, now: datetime) -> list[Change]:
            return plan_definitions(specs, known, by=by, now=now)

        return await self._change(plan, [spec.name for spec in specs])

    async def command_device(
        self, name: str, command: DeviceCommand, *, by: str, audit: AuditEntry | None = None
    ) -> DeviceStatus:
        if clean(name) != name:
            raise UnknownDevice(name)

        is_busy = isinstance(command, TakeDevice) and await self._is_busy(name)

        def plan(known: Known, now: datetime) -> list[Change]:
            change = plan_command(name, command, known, by=by, now=now, is_busy=is_busy)
            return [] if change is None else [change]

        read = None if isinstance(command, EditDevice) else [name]
        (status,) = await self._change(plan, [name], audit, read=read)
        return status

    async def _is_busy(self, name: str) -> bool:
        """Read before the order is written. A run that ends meanwhile does no harm: its node begins the time."""
        async with self._db.asked():
            return any(one.task for one in await self._db.read(partial(list_devices, names=[name])))

    async def _change(
        self,
        plan: Callable[[Known, datetime], list[Change]],
        names: Sequence[str],
        audit: AuditEntry | None = None,
        *,
        read: Sequence[str] | None = None,
    ) -> list[DeviceStatus]:
        """Write what `plan` makes of the devices, of all or of those to read; then how these are."""
        async with self._db.asked():
            for n in range(TRIES):
                if n > 1:
                    await give_way(n)
                stamp, known = await self._db.read(partial(_read_known, names=read))
                now = self._clock.now()
                if changes := plan(known, now):
                    row = await self._db.write(WRITE, stamp, _encode(changes), now, encode_entry(audit))
                    if not row[0]:
                        continue
                    self._db.hints.tell()
                found = await self._db.read(partial(list_devices, names=names))
                statuses = {status.name: status for status in found}
                # Race: somebody may have removed one of them meanwhile.
                if missing := next((name for name in names if name not in statuses), None):
                    raise UnknownDevice(missing)
                return [statuses[name] for name in names]
            raise busy(self.url)

    async def remove_device(
        self, name: str, *, force: bool = False, by: str = "", audit: AuditEntry | None = None
    ) -> None:
        if clean(name) != name:
            raise UnknownDevice(name)
        async with self._db.asked():
            detail = to_text(device_detail(name, actor=by))
            row = await self._db.write(REMOVE, name, force, self._clock.now(), detail, encode_entry(audit))
            if row["busy"] is not None:
                raise DeviceBusy(name, row["busy"])
            if not row["is_known"]:
                raise UnknownDevice(name)
            self._db.hints.tell()

    async def serve_devices(self, node: str, names: Sequence[str]) -> list[str]:
        async with self._db.asked():
            asked = [name for name in dict.fromkeys(names) if clean(name) == name]
            row = await self._db.write(SERVE, node, asked, self._clock.now())
            return list(row[0])

    async def unserve_devices(self, node: str, names: Sequence[str]) -> None:
        async with self._db.asked():
            await self._db.write(UNSERVE, node, [clean(name) for name in names], self._clock.now())
            self._db.hints.tell()

    async def report_devices(self, node: str, reports: Sequence[DeviceReport]) -> list[str]:
        latest = {report.name: report for report in reports if clean(report.name) == report.name}
        async with self._db.asked():
            rows = [_report_row(report) for report in latest.values()]
            row = await self._db.write(REPORT, node, msgspec.json.encode(rows).decode(), self._clock.now())
            self._db.hints.tell()
            served = set(row[0])
        return [name for name in dict.fromkeys(report.name for report in reports) if name not in served]

    async def list_quarantined_accounts(self, pool: str | None = None) -> list[QuarantinedAccount]:
        return await self._db.ask(partial(_read_accounts, pool=clean(pool)))

    async def quarantine_account(self, quarantined: QuarantinedAccount, *, audit: AuditEntry | None = None) -> None:
        async with self._db.asked():
            texts = map(clean, (quarantined.pool, quarantined.account, quarantined.consumer))
            stamp = quarantined.quarantined
            detail = to_text(account_detail(quarantined.account, stamp.actor))
            row = await self._db.write(
                QUARANTINE,
                *texts,
                quarantined.failures,
                to_text(stamp),
                detail,
                self._clock.now(),
                encode_entry(audit),
            )
            if row[0]:
                self._db.hints.tell()

    async def release_account(
        self, pool: str, account: str, consumer: str | None, *, by: str, audit: AuditEntry | None = None
    ) -> int:
        async with self._db.asked():
            detail, now = to_text(account_detail(account, by)), self._clock.now()
            texts = map(clean, (pool, account, consumer))
            row = await self._db.write(RELEASE, *texts, detail, now, encode_entry(audit))
            released: int = row[0]
            if released:
                self._db.hints.tell()
            return released

    async def list_device_runs(
        self, where: RunFilter, *, limit: int = 100, before: tuple[int, int] | None = None
    ) -> list[tuple[tuple[int, int], DeviceRun]]:
        return await self._db.ask(partial(list_runs, where=where, limit=limit, before=before))

    async def tally_device_runs(self, where: RunFilter, *, by_account: bool = False) -> list[RunTally]:
        return await self._db.ask(partial(tally_runs, where=where, by_account=by_account))


def _check_storable(specs: Sequence[DeviceSpec]) -> None:
    """Names are looked up as they are, so that nothing in them may be replaced."""
    for spec in specs:
        for text in (spec.name, spec.pool, spec.adapter, spec.address):
            if clean(text) != text:
                raise InvalidInput(f"{quote(text)}, of a device, has characters that cannot be stored")


def _encode(changes: Sequence[Change]) -> str:
    """The rows, with the event of each."""
    return msgspec.json.encode([_row(change) for change in changes]).decode()


def _row(change: Change) -> dict[str, Any]:
    device = change.device
    return msgspec.structs.asdict(device.health) | {
        "name": device.spec.name,
        "pool": device.spec.pool,
        "number": device.spec.number,
        "adapter": device.spec.adapter,
        "address": device.spec.address or None,
        "node": device.node,
        "version": device.version,
        "definition": to_text(device.spec),
        "edits": to_text(device.edits),
        "orders": to_text(device.orders),
        "kind": change.kind,
        "detail": to_text(change.detail),
    }


def _report_row(report: DeviceReport) -> dict[str, Any]:
    health = report.health
    detail = device_detail(report.name, code="" if health.is_up else health.reason)
    texts = {"reason": clean(health.reason), "step": clean(health.step), "detail": to_text(detail)}
    return msgspec.structs.asdict(health) | {"name": report.name} | texts


# --- reading ----------------------------------------------------------------------------------------------------------


async def _read_known(conn: Connection, names: Sequence[str] | None) -> tuple[int, dict[str, StoredDevice]]:
    # The stamp first: what changes meanwhile makes it an old one.
    stamp = await conn.fetchval(_STAMP)
    rows = await conn.fetch(_DEVICES, names, None)
    return stamp, {device.spec.name: device for device in map(_to_device, rows)}


async def list_devices(
    conn: Connection, pools: Sequence[str | None] | None = None, names: Sequence[str] | None = None
) -> list[DeviceStatus]:
    rows = await conn.fetch(_DEVICES, names, pools)
    if not rows:
        return []
    occupied = {device: Occupation(uuid, key or "", since) for device, uuid, key, since in await conn.fetch(_BUSY)}
    nodes = {node["incarnation"]: node["name"] for node in await conn.fetch(_NODES)}
    statuses = [
        make_status(device, node_name=nodes.get(device.node, ""), busy=occupied.get(device.spec.name))
        for device in map(_to_device, rows)
    ]
    return sorted(statuses, key=shown_first)


def _to_device(row: Any) -> StoredDevice:
    definition, edits, orders, version, node, is_up, since, reason, step, beat_at = row
    return StoredDevice(
        spec=_read_spec.decode(definition),
        edits=_read_edits.decode(edits),
        orders=_read_orders.decode(orders),
        health=DeviceHealth(is_up=is_up, since=since, reason=reason, step=step, beat_at=beat_at),
        version=version,
        node=node,
    )


async def _read_accounts(conn: Connection, pool: str | None) -> list[QuarantinedAccount]:
    return [
        QuarantinedAccount(
            pool=of_pool,
            account=account,
            consumer=consumer,
            failures=failures,
            quarantined=_read_stamp.decode(quarantined),
        )
        for of_pool, account, consumer, failures, quarantined in await conn.fetch(_ACCOUNTS, pool)
    ]
