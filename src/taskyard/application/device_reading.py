"""Documents of devices, made of what the store has of them, of their tasks and of their runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from taskyard.application.device_documents import (
    DeviceDocument,
    DeviceHistory,
    OrdersDocument,
    RunQuery,
    account_id,
    run_document,
    tally_document,
)
from taskyard.application.errors import unknown_device
from taskyard.device_admin import Devices
from taskyard.errors import InvalidInput
from taskyard.model.device import DeviceHealth, DeviceState, DeviceStatus, RunTally
from taskyard.model.notes import AuditStamp
from taskyard.model.redaction import Redactor, redact
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Store

EXTRA_TASKS = 100
"""Running tasks of a pool that are read beyond one for each busy device: a device may have been removed meanwhile."""

MAX_TALLIES = 1_000
"""Devices, and accounts, that a history adds up one by one."""

_S = DeviceState


# --- devices ----------------------------------------------------------------------------------------------------------


async def find_running(store: Store, statuses: Sequence[DeviceStatus]) -> dict[str, TaskRecord]:
    """The tasks that run on these devices, by their ids."""
    found: dict[str, TaskRecord] = {}
    busy = [status for status in statuses if status.task]
    for pool in {status.spec.pool for status in busy}:
        where = TaskFilter(states=(TaskState.RUNNING,), queue=pool)
        records = await store.list_tasks(where, limit=len(busy) + EXTRA_TASKS)
        found.update((record.uuid, record) for record in records)
    return found


async def find_last_ends(devices: Devices, pool: str | None, count: int) -> dict[str, datetime]:
    """When the last run on a device ended, of those devices that have one among the last `count` runs."""
    ends: dict[str, datetime] = {}
    for _, run in await devices.history(pool=pool, limit=count) if count else ():
        if run.finished_at is not None:
            ends[run.device] = max(run.finished_at, ends.get(run.device, run.finished_at))
    return ends


async def mark_dead(store: Store, statuses: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """The same, but a device whose node is dead or silent is down. The store leaves it with that node, and its task as
    running, until another node takes both back: if there is none, for ever."""
    nodes = await store.nodes() if any(status.node for status in statuses) else []
    dead = set(await store.dead_nodes()) if nodes else set()
    dead |= {status.node.incarnation for status in nodes if status.is_silent}
    return [_without_node(status) if status.node in dead else status for status in statuses]


def _without_node(status: DeviceStatus) -> DeviceStatus:
    health = DeviceHealth(reason=f"its node {status.node_name} is dead")
    return msgspec.structs.replace(status, health=health)


async def describe_devices(
    store: Store, statuses: Sequence[DeviceStatus], ends: Mapping[str, datetime], *, now: datetime, reveal: bool = False
) -> tuple[DeviceDocument, ...]:
    running = await find_running(store, statuses)
    statuses = await mark_dead(store, statuses)
    return tuple(
        DeviceDocument(**device_fields(one, running.get(one.task), ends.get(one.name), now=now, reveal=reveal))
        for one in statuses
    )


def device_fields(
    status: DeviceStatus, record: TaskRecord | None, last_end: datetime | None, *, now: datetime, reveal: bool = False
) -> dict[str, Any]:
    """The values of a `DeviceDocument`."""
    spec, orders = status.spec, status.orders.at(now)
    return {
        "name": spec.name,
        "number": spec.number,
        "pool": spec.pool,
        "adapter": spec.adapter,
        "address": spec.address,
        "settings": spec.settings if reveal else redact(spec.settings),
        "labels": spec.labels,
        "host": spec.host,
        "from_code": spec.from_code,
        **_state_fields(status, last_end, now),
        "step": status.health.step,
        "takes_tasks": status.takes_tasks_at(now),
        "orders": OrdersDocument(**msgspec.structs.asdict(orders)),
        "node": status.node,
        "node_name": status.node_name,
        "beat_at": None if status.health.is_up else status.health.beat_at,
        "task": status.task or None,
        "consumer": None if record is None else record.consumer,
        "account": account_id(status.account),
        "busy_since": status.busy_since,
        "progress": None if record is None else Redactor(record).value(record.progress),
        "version": status.version,
    }


def _state_fields(status: DeviceStatus, last_end: datetime | None, now: datetime) -> dict[str, Any]:
    state, orders = status.state_at(now), status.orders.at(now)
    match state:
        case _S.QUARANTINED:
            return _ordered(state, orders.quarantined)
        case _S.TAKEN:
            return _ordered(state, orders.taken, until=orders.taken_until)
        case _S.DRAINING if orders.drained is None:  # taken, and its task goes on
            return _ordered(state, orders.taken, until=orders.taken_until)
        case _S.DRAINING:
            return _ordered(state, orders.drained)
        case _S.DOWN:
            return _plain(state, status.health.since, reason=status.health.reason)
        case _S.BUSY:
            return _plain(state, status.busy_since)
        case _S.IDLE:
            return _plain(state, _latest(status.health.since, last_end))


def _ordered(state: DeviceState, stamp: AuditStamp | None, *, until: datetime | None = None) -> dict[str, Any]:
    assert stamp is not None  # the state follows from it
    return {"state": state, "since": stamp.at, "reason": stamp.reason, "by": stamp.actor, "until": until}


def _plain(state: DeviceState, since: datetime | None, *, reason: str = "") -> dict[str, Any]:
    return {"state": state, "since": since, "reason": reason, "by": "", "until": None}


def _latest(*times: datetime | None) -> datetime | None:
    return max((at for at in times if at is not None), default=None)


# --- history ----------------------------------------------------------------------------------------------------------


async def read_history(devices: Devices, where: RunQuery, *, before: str | None, limit: int) -> DeviceHistory:
    place = None if before is None else parse_place(before)
    found = []
    for device in where.devices or (None,):
        asked = _asked(where, device)
        found += await devices.history(**asked, before=place, limit=limit + 1)
    found.sort(key=lambda one: one[0], reverse=True)
    by_device: list[RunTally] = []
    by_account: list[RunTally] = []
    if before is None:
        by_device = await _tallies(devices, where, by_account=False)
        by_account = await _tallies(devices, where, by_account=True)
        if not found and not by_device:
            await check_known(devices, where.devices)
    return DeviceHistory(
        runs=tuple(run_document(run) for _, run in found[:limit]),
        next=place_text(found[limit - 1][0]) if len(found) > limit else None,
        devices=tuple(tally_document(one) for one in by_device[:MAX_TALLIES]),
        accounts=tuple(tally_document(one, by_account=True) for one in by_account[:MAX_TALLIES]),
        more_devices=max(0, len(by_device) - MAX_TALLIES),
        more_accounts=max(0, len(by_account) - MAX_TALLIES),
    )


async def _tallies(devices: Devices, where: RunQuery, *, by_account: bool) -> list[RunTally]:
    """Those with the lowest success rate first."""
    total: dict[str, RunTally] = {}
    for device in where.devices or (None,):
        for one in await devices.success_rates(**_asked(where, device), by_account=by_account):
            total[one.name] = add_tallies(total.get(one.name, RunTally(name=one.name)), one)
    return sorted(total.values(), key=lambda one: (2.0 if one.success_rate is None else one.success_rate, one.name))


def _asked(where: RunQuery, device: str | None) -> dict[str, Any]:
    return {
        "pool": where.pool,
        "device": device,
        "account_id": where.account,
        "consumer": where.consumer,
        "since": where.since,
    }


def add_tallies(one: RunTally, other: RunTally) -> RunTally:
    return RunTally(
        name=one.name,
        completed=one.completed + other.completed,
        failed=one.failed + other.failed,
        interrupted=one.interrupted + other.interrupted,
        canceled=one.canceled + other.canceled,
        busy_s=one.busy_s + other.busy_s,
        last_at=_latest(one.last_at, other.last_at),
    )


async def check_known(devices: Devices, names: Iterable[str]) -> None:
    """Raise `UnknownDevice` for the first that is not in the store."""
    known = [status.name for status in await devices.list_all()]
    for name in names:
        if name not in known:
            raise unknown_device(name, known)


def place_text(place: tuple[int, int]) -> str:
    """Where a run stands in the history, as text: `1042-7`."""
    return f"{place[0]}-{place[1]}"


def parse_place(text: str) -> tuple[int, int]:
    token, dash, task = text.partition("-")
    if not (dash and token.isdecimal() and task.isdecimal() and len(text) < 40):
        raise InvalidInput("is no place in a history; take it from `next` of a page", field="before", given=text)
    return int(token), int(task)
