"""`Devices`: what people do to the devices of a store, and what they ask about them."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from taskyard.device_pool import device_store
from taskyard.devices.definitions import DeviceDefinition, GameAccount
from taskyard.devices.kinds import check_spec, known_kinds
from taskyard.errors import InvalidInput, UnknownDevice
from taskyard.model.audit import CODE, AuditEntry, TargetKind, command_entry, make_entry
from taskyard.model.device import (
    DeviceCommand,
    DeviceRun,
    DeviceSpec,
    DeviceStatus,
    DrainDevice,
    EditDevice,
    GiveBackDevice,
    QuarantinedAccount,
    QuarantineDevice,
    RunFilter,
    RunTally,
    TakeDevice,
    edit_device,
)
from taskyard.model.given import check_by, check_count, check_labels, check_name, check_reason, check_time, check_wait
from taskyard.model.kinds import checked_verbs
from taskyard.model.notes import AuditStamp
from taskyard.ports.device import DeviceStore

if TYPE_CHECKING:
    from taskyard.yard import Yard

T = TypeVar("T")

log = logging.getLogger("taskyard.devices")


@checked_verbs
class Devices:
    """The devices of a store, also from a process that serves none (`yard.client()`). `by` is who asks: it is kept with
    the order, and in the audit record."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard

    def _find_store(self) -> DeviceStore:
        return device_store(self._yard.store)

    async def list_all(self, pool: str | None = None) -> list[DeviceStatus]:
        """All devices, or those of one pool, by pool and number. `status.state_at(yard.now())` is what one does."""
        return await self._find_store().list_devices(None if pool is None else check_name("pool", pool))

    async def get(self, name: str) -> DeviceStatus:
        """One device; `UnknownDevice` if there is none of this name."""
        for status in await self.list_all():
            if status.name == name:
                return status
        raise UnknownDevice(name)

    async def add(
        self,
        device: DeviceDefinition | DeviceSpec,
        pool: str | None = None,
        *,
        by: str = CODE,
    ) -> DeviceStatus:
        """Add a device to a pool, as its definition or as what a store keeps of one. A node that serves the pool
        connects to it within a second. `DeviceExists` if its name, number or address is taken. The settings are
        checked, unless only another program knows the kind of the device."""
        if isinstance(device, DeviceDefinition):
            if pool is None:
                raise InvalidInput("name the pool that the device is for", field="pool")
            spec = replace(device.spec(check_name("pool", pool)), from_code=False)
        else:
            spec = self._check_kind(_check_spec(device, pool))
        audit = self._entry(by, "add_device", spec.name, details={"pool": spec.pool, "adapter": spec.adapter})
        added = await self._done(self._find_store().add_device(spec, by=check_by(by), audit=audit))
        await self._warn_of_pool(spec)
        return added

    async def _warn_of_pool(self, spec: DeviceSpec) -> None:
        """Say so if this looks like a mistyped pool. It is no error: a worker for it may start later."""
        nodes, devices = await self._yard.store.nodes(), await self.list_all()
        served = {queue for status in nodes for queue in status.node.queues} | self._yard._device_pools.keys()
        others = sorted({status.spec.pool for status in devices} - {spec.pool})
        has_mates = any(status.spec.pool == spec.pool and status.name != spec.name for status in devices)
        if spec.pool in served or (not nodes and (has_mates or not others)):
            return
        known = ", ".join(others) or "none"
        log.warning("no running node serves the pool %r of the device %s; other pools: %s", spec.pool, spec.name, known)

    async def edit(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        address: str | None = None,
        settings: Mapping[str, Any] | None = None,
        host: str | None = None,
        reason: str = "",
        by: str = CODE,
    ) -> DeviceStatus:
        """Change how a device is reached or what tasks may require of it. A label with an empty text is removed, and
        the others stay. While a task runs on it, a new address waits for the end of that. `settings` are all settings
        that it has afterwards. They are checked, unless only another program knows the kind of the device."""
        command = EditDevice(
            labels=None if labels is None else _check_edit(labels),
            address=address,
            settings=None if settings is None else dict(settings),
            host=host,
            reason=check_reason(reason),
        )
        if address is not None or settings is not None:
            self._check_kind(edit_device((await self.get(name)).spec, command))
        return await self._ask(name, command, by)

    def _check_kind(self, spec: DeviceSpec) -> DeviceSpec:
        """The definition, if it makes sense to its kind."""
        kinds = self._yard._device_kinds(spec.pool)
        return check_spec(spec, kinds) if spec.adapter in known_kinds(kinds) else spec

    async def label(self, name: str, labels: Mapping[str, str], *, by: str = CODE) -> DeviceStatus:
        """Set labels of a device; one with an empty text is removed."""
        return await self._ask(name, EditDevice(labels=_check_edit(labels)), by, verb="label")

    async def drain(self, name: str, *, reason: str = "", by: str = CODE) -> DeviceStatus:
        """Give the device no new task. What runs on it goes on."""
        return await self._ask(name, DrainDevice(check_reason(reason)), by)

    async def take(self, name: str, *, for_s: float | None = None, reason: str = "", by: str = CODE) -> DeviceStatus:
        """Take the device to use it by hand, when what runs on it has ended; for so many seconds, or until
        `give_back`."""
        return await self._ask(name, TakeDevice(check_reason(reason), check_wait("for_s", for_s)), by)

    async def give_back(self, name: str, *, reason: str = "", by: str = CODE) -> DeviceStatus:
        """Take back all orders: the device is no longer drained, taken or quarantined."""
        return await self._ask(name, GiveBackDevice(check_reason(reason)), by)

    async def quarantine(self, name: str, *, reason: str = "", by: str = CODE) -> DeviceStatus:
        """Set the device aside until `give_back`."""
        return await self._ask(name, QuarantineDevice(check_reason(reason)), by)

    async def remove(self, name: str, *, force: bool = False, by: str = CODE) -> None:
        """Forget the device; its history stays. `DeviceBusy` while a task runs on it, unless `force`: the run is then
        interrupted as if the device was lost. A task that starts at the same moment may meet that without `force`:
        drain the device first to be sure."""
        audit = self._entry(by, "remove_device", name, details={"force": True} if force else {})
        await self._done(self._find_store().remove_device(name, force=force, by=check_by(by), audit=audit))

    # --- accounts -----------------------------------------------------------------------------------------------------

    async def quarantined_accounts(self, pool: str | None = None) -> list[QuarantinedAccount]:
        """The accounts and consumers whose tasks are refused."""
        return await self._find_store().list_quarantined_accounts(pool)

    async def quarantine_account(
        self, pool: str, account_id: int | str, consumer: str, *, reason: str = "", by: str = CODE
    ) -> None:
        """Refuse tasks of this account and consumer until `release`. Those that wait go on."""
        account, now = GameAccount(account_id).key, self._yard.now()
        stamp = AuditStamp(check_by(by), now, check_reason(reason))
        quarantined = QuarantinedAccount(
            pool=check_name("pool", pool),
            account=account,
            consumer=check_name("consumer", consumer),
            failures=0,
            quarantined=stamp,
        )
        details = {"pool": pool, "consumer": consumer}
        audit = make_entry(
            by, "quarantine_account", TargetKind.ACCOUNT, account, now=now, reason=reason, details=details
        )
        await self._done(self._find_store().quarantine_account(quarantined, audit=audit))

    async def release(self, pool: str, account_id: int | str, consumer: str | None = None, *, by: str = CODE) -> int:
        """Take tasks of this account again, of one consumer or of all; how many were refused. Its failures so far no
        longer count."""
        account = GameAccount(account_id).key
        details = {"pool": pool} | ({} if consumer is None else {"consumer": consumer})
        audit = make_entry(by, "release_account", TargetKind.ACCOUNT, account, now=self._yard.now(), details=details)
        store = self._find_store()
        return await self._done(store.release_account(pool, account, consumer, by=check_by(by), audit=audit))

    # --- history ------------------------------------------------------------------------------------------------------

    async def history(
        self,
        *,
        pool: str | None = None,
        device: str | None = None,
        account_id: int | str | None = None,
        consumer: str | None = None,
        since: datetime | None = None,
        limit: int = 100,
        before: tuple[int, int] | None = None,
    ) -> list[tuple[tuple[int, int], DeviceRun]]:
        """The runs on devices that match, newest first. Go on with `before`, the first part of the last one seen."""
        where = _run_filter(pool, device, account_id, consumer, since)
        limit = check_count("limit", limit, least=1)
        return await self._find_store().list_device_runs(where, limit=limit, before=before)

    async def success_rates(
        self,
        *,
        by_account: bool = False,
        pool: str | None = None,
        device: str | None = None,
        account_id: int | str | None = None,
        consumer: str | None = None,
        since: datetime | None = None,
    ) -> list[RunTally]:
        """How the runs that match ended, by device or by account; `tally.success_rate` is the share that completed."""
        where = _run_filter(pool, device, account_id, consumer, since)
        return await self._find_store().tally_device_runs(where, by_account=by_account)

    # --- asking the store ---------------------------------------------------------------------------------------------

    async def _ask(self, name: str, command: DeviceCommand, by: str, *, verb: str | None = None) -> DeviceStatus:
        """`verb` is what the audit record calls the command, if not by its own name."""
        audit = command_entry(check_by(by), command, TargetKind.DEVICE, name, now=self._yard.now())
        if audit is not None and verb is not None:
            audit = replace(audit, command=verb)
        return await self._done(self._find_store().command_device(name, command, by=by, audit=audit))

    def _entry(self, by: str, command: str, name: str, *, details: dict[str, Any]) -> AuditEntry | None:
        return make_entry(check_by(by), command, TargetKind.DEVICE, name, now=self._yard.now(), details=details)

    async def _done(self, asking: Coroutine[Any, Any, T]) -> T:
        """What the store answers; the pools of this process hear of it at once."""
        answer = await asking
        self._yard._look_at_devices()
        return answer


def _check_spec(spec: DeviceSpec, pool: str | None) -> DeviceSpec:
    spec = spec if pool is None else replace(spec, pool=pool)
    return replace(
        spec,
        pool=check_name("pool", spec.pool),
        name=check_name("the name of a device", spec.name),
        number=check_count("number", spec.number, least=0),
        adapter=check_name("adapter", spec.adapter),
        labels=check_labels(spec.labels),
        from_code=False,
    )


def _check_edit(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels to set; an empty text stands for none."""
    check_labels({name: text or "-" for name, text in labels.items()})
    return dict(labels)


def _run_filter(
    pool: str | None, device: str | None, account_id: int | str | None, consumer: str | None, since: datetime | None
) -> RunFilter:
    return RunFilter(
        pool=pool,
        device=device,
        account=None if account_id is None else GameAccount(account_id).key,
        consumer=consumer,
        since=None if since is None else check_time("since", since),
    )
