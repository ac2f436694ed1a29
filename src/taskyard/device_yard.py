"""The part of a yard that has devices: its pools, and the administration of what a store keeps of devices.

Nothing of `taskyard.devices` is imported before a yard has a pool or is asked for `devices`: most programs have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from taskyard.errors import InvalidInput, quote
from taskyard.opened import Opened
from taskyard.ports.store import Store

if TYPE_CHECKING:
    from taskyard.device_admin import Devices
    from taskyard.device_pool import DevicePool
    from taskyard.devices.actor_settings import ActorSettings
    from taskyard.devices.definitions import DeviceDefinition


class YardDevices(Opened):
    """Pools of devices by name. They start and stop with the yard."""

    def __init__(self) -> None:
        super().__init__()
        self._device_pools: dict[str, DevicePool] = {}

    def device_pool(
        self,
        name: str,
        *,
        devices: Iterable[DeviceDefinition] = (),
        bucket_by: str | None = None,
        heartbeat_s: float | None = None,
        actor: ActorSettings | None = None,
        auto_recover: int = 1,
        quarantine_account_after: int | None = 5,
        adapters: Iterable[type[DeviceDefinition]] = (),
    ) -> DevicePool:
        """A pool of devices, each of which runs one task at a time, in strict order; before the yard is opened. Make
        its consumers with `@pool.consumer` and submit with `pool.enqueue`. The pool is a queue of the same name.

        `devices` are those of this program; people may add others. With `bucket_by="role"` the tasks that require
        different roles wait in lines of their own, which take turns. A device is asked every `heartbeat_s` seconds (10)
        whether it answers, and is down after two of these without an answer. `actor` has all of its times, and what is
        done about an outage; `heartbeat_s` is short for `ActorSettings(heartbeat_s=…)`. A task whose device was lost
        goes to another one `auto_recover` times. After so many failed runs in a row (`quarantine_account_after`, None:
        never) tasks of that account and consumer are refused. `adapters` are classes for kinds of devices of your
        own."""
        from taskyard.device_pool import DevicePool
        from taskyard.devices.pool_settings import PoolSettings

        if self.is_open:
            raise InvalidInput(f"make the device pool {quote(name)} before the yard is opened")
        if name in self._device_pools:
            raise InvalidInput(f"there is a device pool {quote(name)} already")
        yard: Any = self
        settings = PoolSettings(
            bucket_by=bucket_by,
            heartbeat_s=heartbeat_s,
            actor=actor,
            auto_recover=auto_recover,
            quarantine_account_after=quarantine_account_after,
        )
        pool = DevicePool(yard, name, settings, devices=devices, adapters=adapters)
        self._device_pools[name] = pool
        return pool

    @property
    def devices(self) -> Devices:
        """The devices of the store: list, add, label, take and drain them, and see how their runs ended."""
        from taskyard.device_admin import Devices

        yard: Any = self
        return Devices(yard)

    def _device_kinds(self, pool: str) -> tuple[type[DeviceDefinition], ...]:
        """The classes of devices that this program has for a pool, beside those of Taskyard."""
        found = self._device_pools.get(pool)
        return () if found is None else found.kinds

    async def _define_devices(self, store: Store) -> None:
        """Before the node joins: what is wrong with the devices of the program is raised here."""
        for pool in self._device_pools.values():
            await pool.define(store)

    def _serve_devices(self) -> None:
        """The node has joined."""
        for pool in self._device_pools.values():
            pool.begin()

    async def _pause_devices(self) -> None:
        """The node is about to stop."""
        for pool in self._device_pools.values():
            await pool.pause()

    def _look_at_devices(self) -> None:
        """Somebody has changed a device, or an account, in this process."""
        for pool in self._device_pools.values():
            pool.look()
