"""Devices: what they do, commands on them, their history, and accounts that are quarantined."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from taskyard.application.calls import YardContext, check_limit
from taskyard.application.device_documents import (
    DeviceChange,
    DeviceCommand,
    DeviceDetail,
    DeviceDocument,
    DeviceHistory,
    DeviceOverview,
    DeviceReceipt,
    DeviceRequest,
    DrainDevice,
    GiveBackDevice,
    QuarantinedAccountDocument,
    QuarantineDevice,
    ReleaseReceipt,
    RunQuery,
    TakeDevice,
    account_document,
    run_document,
    tally_document,
)
from taskyard.application.device_overview import DeviceOverviewReader, watch_devices
from taskyard.application.device_reading import (
    describe_devices,
    device_fields,
    find_last_ends,
    find_running,
    mark_dead,
    read_history,
)
from taskyard.application.errors import NotQuarantined, UnknownPool, describe_error, unknown_device
from taskyard.errors import DeviceExists, InvalidInput, StoreError, TaskyardError
from taskyard.model.device import DeviceSpec, DeviceStatus, EditDevice, RunTally, edit_device
from taskyard.model.given import check_count, check_name

_Do = Callable[[DeviceStatus], Awaitable[DeviceReceipt]]

NUMBER_TRIES = 20
"""How often a free number is looked for: others may add devices at the same moment."""


class LocalDevices:
    """`DeviceCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    @property
    def _actor(self) -> str:
        return self._context.actor

    # --- queries ------------------------------------------------------------------------------------------------------

    async def list(self, pool: str | None = None) -> tuple[DeviceDocument, ...]:
        yard = self._context.yard
        statuses = await self._find(pool)
        ends = await find_last_ends(yard.devices, pool, 2 * len(statuses))
        return await describe_devices(yard.store, statuses, ends, now=yard.now())

    async def _find(self, pool: str | None) -> Sequence[DeviceStatus]:
        """The devices of a pool, or of all. Raises `UnknownPool` if there is nothing of this name."""
        yard = self._context.yard
        statuses = await yard.devices.list_all(pool)
        if pool is not None and not statuses:
            pools = sorted({status.spec.pool for status in await yard.devices.list_all()})
            if pool not in {status.name for status in await yard.queues()}:
                raise UnknownPool(pool, pools)
        return statuses

    async def get(self, name: str, *, limit: int = 10, reveal: bool = False) -> DeviceDetail:
        yard, devices = self._context.yard, self._context.yard.devices
        check_limit(limit)
        (status,) = await mark_dead(yard.store, [await self._get(name)])
        running = await find_running(yard.store, [status])
        runs = [run for _, run in await devices.history(device=name, limit=limit)]
        ends = [run.finished_at for run in runs if run.finished_at is not None]
        tallies = await devices.success_rates(device=name)
        fields = device_fields(status, running.get(status.task), max(ends, default=None), now=yard.now(), reveal=reveal)
        return DeviceDetail(
            **fields,
            tally=tally_document(tallies[0] if tallies else RunTally(name=name)),
            runs=tuple(map(run_document, runs)),
        )

    async def _get(self, name: str) -> DeviceStatus:
        known = {status.name: status for status in await self._context.yard.devices.list_all()}
        if name not in known:
            raise unknown_device(name, sorted(known))
        return known[name]

    async def history(self, where: RunQuery, *, before: str | None = None, limit: int = 20) -> DeviceHistory:
        return await read_history(self._context.yard.devices, where, before=before, limit=check_limit(limit))

    async def overview(self, pool: str | None = None) -> DeviceOverview:
        await self._find(pool)
        return await DeviceOverviewReader(self._context.yard, pool).read()

    async def watch(self, pool: str | None = None, *, min_interval_s: float = 0.2) -> AsyncIterator[DeviceOverview]:
        await self._find(pool)
        async for seen in watch_devices(self._context.yard, pool, min_interval_s=min_interval_s):
            yield seen

    # --- definitions --------------------------------------------------------------------------------------------------

    async def add(self, request: DeviceRequest) -> DeviceDocument:
        spec = DeviceSpec(
            pool=check_name("pool", request.pool),
            name=check_name("the name of a device", request.name),
            number=0 if request.number is None else check_count("number", request.number, least=0),
            adapter=check_name("adapter", request.adapter),
            address=request.address,
            settings=request.settings,
            labels=request.labels,
            host=request.host and check_name("host", request.host),
        )
        spec = self._check(spec, request.settings_text)
        devices = self._context.yard.devices
        if request.number is not None:
            return await self._describe(await devices.add(spec, by=self._actor))
        number = 1
        for _ in range(NUMBER_TRIES):
            taken = [status.spec.number for status in await devices.list_all(spec.pool)]
            number = max([number, *(one + 1 for one in taken)])
            try:
                numbered = msgspec.structs.replace(spec, number=number)
                return await self._describe(await devices.add(numbered, by=self._actor))
            except DeviceExists as exists:
                if exists.what != "number":
                    raise
        raise InvalidInput("of this pool is taken by others again and again; give one", field="number")

    def _check(self, spec: DeviceSpec, texts: Mapping[str, str], *, is_new: bool = True) -> DeviceSpec:
        """The definition as its adapter understands it, with texts for settings that must be texts. `InvalidInput` if
        there is no such adapter, or if the settings or the address make no sense to it. A stored device may have an
        adapter that only the code of its pool knows."""
        from taskyard.devices.kinds import check_served, check_spec, known_kinds

        kinds = self._context.yard._device_kinds(spec.pool)
        if not is_new and spec.adapter not in known_kinds(kinds):
            return spec
        if is_new and spec.pool in self._context.yard._device_pools:
            check_served(spec.adapter, kinds)
        try:
            return check_spec(spec, kinds)
        except InvalidInput as wrong:
            if wrong.field not in spec.settings:
                raise
            text = texts.get(wrong.field)
            if text is None or spec.settings[wrong.field] == text:
                raise InvalidInput(f"the setting {wrong}") from None
            settings = {**spec.settings, wrong.field: text}
            return self._check(msgspec.structs.replace(spec, settings=settings), texts, is_new=is_new)

    async def edit(self, name: str, change: DeviceChange) -> DeviceReceipt:
        status = await self._get(name)
        settings = None if change.settings is None else merge_settings(status.spec.settings, change.settings)
        if change.address is not None or settings is not None:
            edited = edit_device(status.spec, EditDevice(address=change.address, settings=settings))
            edited = self._check(edited, change.settings_text, is_new=False)
            settings = None if settings is None else edited.settings
        after = await self._context.yard.devices.edit(
            name, address=change.address, settings=settings, host=change.host, reason=change.reason, by=self._actor
        )
        return await self._receipt(status, after)

    async def label(self, names: Sequence[str], labels: Mapping[str, str]) -> tuple[DeviceReceipt, ...]:
        async def label(status: DeviceStatus) -> DeviceReceipt:
            after = await self._context.yard.devices.label(status.name, labels, by=self._actor)
            return await self._receipt(status, after)

        return await self._each(names, label)

    async def _receipt(self, before: DeviceStatus, after: DeviceStatus) -> DeviceReceipt:
        changed = after.version != before.version
        return DeviceReceipt(name=after.name, ok=True, changed=changed, device=await self._describe(after))

    async def remove(self, names: Sequence[str], *, force: bool = False) -> tuple[DeviceReceipt, ...]:
        async def remove(status: DeviceStatus) -> DeviceReceipt:
            await self._context.yard.devices.remove(status.name, force=force, by=self._actor)
            return DeviceReceipt(name=status.name, ok=True, changed=True)

        return await self._each(names, remove)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def apply(self, names: Sequence[str], command: DeviceCommand) -> tuple[DeviceReceipt, ...]:
        async def apply(status: DeviceStatus) -> DeviceReceipt:
            return await self._receipt(status, await self._order(status.name, command))

        return await self._each(names, apply)

    async def _order(self, name: str, command: DeviceCommand) -> DeviceStatus:
        devices, by = self._context.yard.devices, self._actor
        match command:
            case DrainDevice(reason=reason):
                return await devices.drain(name, reason=reason, by=by)
            case TakeDevice(reason=reason, for_s=for_s):
                return await devices.take(name, for_s=for_s, reason=reason, by=by)
            case QuarantineDevice(reason=reason):
                return await devices.quarantine(name, reason=reason, by=by)
            case GiveBackDevice(reason=reason):
                return await devices.give_back(name, reason=reason, by=by)

    async def _each(self, names: Sequence[str], do: _Do) -> tuple[DeviceReceipt, ...]:
        """One receipt a device. A refusal does not stop the others; a store that is away does."""
        known = {status.name: status for status in await self._context.yard.devices.list_all()}
        receipts = []
        for name in dict.fromkeys(names):
            try:
                if name not in known:
                    left = await self._context.yard.devices.list_all()
                    raise unknown_device(name, [status.name for status in left])
                receipts.append(await do(known[name]))
            except StoreError:
                raise
            except TaskyardError as refused:
                receipts.append(DeviceReceipt(name=name, ok=False, error=describe_error(refused)))
        return tuple(receipts)

    async def _describe(self, status: DeviceStatus) -> DeviceDocument:
        yard = self._context.yard
        (document,) = await describe_devices(yard.store, [status], {}, now=yard.now())
        return document

    # --- accounts -----------------------------------------------------------------------------------------------------

    async def accounts(self, pool: str | None = None) -> tuple[QuarantinedAccountDocument, ...]:
        return tuple(map(account_document, await self._context.yard.devices.quarantined_accounts(pool)))

    async def release(
        self, account: int | str, *, consumer: str | None = None, pool: str | None = None
    ) -> ReleaseReceipt:
        found = await self.accounts(pool)
        released = [one for one in found if one.account == account and consumer in (None, one.consumer)]
        if not released:
            raise NotQuarantined(account, consumer, [one.account for one in found])
        for name in dict.fromkeys(one.pool for one in released):
            await self._context.yard.devices.release(name, account, consumer, by=self._actor)
        return ReleaseReceipt(released=tuple(released))


def merge_settings(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings after a change; one that is None is removed."""
    return {name: value for name, value in {**old, **changes}.items() if value is not None}
