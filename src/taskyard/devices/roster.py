"""What a store says of a pool: its devices, and the accounts that are quarantined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from taskyard.model.blocker import satisfies
from taskyard.model.device import DeviceStatus
from taskyard.ports.device import DeviceStore


class Roster:
    """Read anew when the stamp of the store has changed: to ask for that is cheap."""

    def __init__(self, pool: str, find_store: Callable[[], DeviceStore]) -> None:
        self._pool, self._find_store = pool, find_store
        self._stamp: tuple[int, int] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading = asyncio.Lock()
        self.version = 0
        """Grows whenever it was read anew."""
        self.devices: list[DeviceStatus] = []
        self.quarantined: frozenset[tuple[str, str]] = frozenset()
        """Accounts and consumers whose tasks are refused."""

    async def look(self, *, anew: bool = False) -> None:
        """Raises what the store raises."""
        store, loop = self._find_store(), asyncio.get_running_loop()
        if loop is not self._loop:  # a yard may be opened again on another one
            self._loop, self._reading = loop, asyncio.Lock()
        async with self._reading:
            # The number is read first: a change that comes meanwhile is found by the next look.
            stamp = id(store), await store.device_stamp()
            if stamp == self._stamp and not anew:
                return
            self.devices = await store.list_devices(self._pool)
            accounts = await store.list_quarantined_accounts(self._pool)
            self.quarantined = frozenset((one.account, one.consumer) for one in accounts)
            self._stamp = stamp
            self.version += 1

    def has_device_for(self, requires: Mapping[str, str]) -> bool:
        """Whether a device of the pool has these labels, whatever it does now."""
        return any(satisfies(one.spec.labels, requires) for one in self.devices)

    def numbers(self) -> dict[str, int]:
        """The number of each device by its name."""
        return {one.name: one.spec.number for one in self.devices}
