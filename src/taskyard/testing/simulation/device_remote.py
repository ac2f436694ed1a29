"""The verbs of devices over the line of a simulated node."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from taskyard.model.audit import AuditEntry
from taskyard.model.device import (
    DeviceCommand,
    DeviceRun,
    DeviceSpec,
    DeviceStatus,
    QuarantinedAccount,
    RunFilter,
    RunTally,
)
from taskyard.ports.device import DeviceReport
from taskyard.stores.memory import MemoryCore
from taskyard.stores.memory.devices import DeviceVerbs
from taskyard.testing.simulation.network import Network
from taskyard.testing.simulation.remote import RemoteStore

T = TypeVar("T")


class DeviceRemote(RemoteStore):
    """A `DeviceStore` on the core that all nodes share."""

    def __init__(self, network: Network, name: str) -> None:
        super().__init__(network, name)
        self._verbs = CoreVerbs(network.core)

    def tell(self, answer: object) -> str:
        """The events of the store say enough."""
        return ""

    async def _do(self, verb: str, do: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self.ask(verb, lambda: run_now(do()))

    async def device_stamp(self) -> int:
        return await self._do("device_stamp", self._verbs.device_stamp)

    async def list_devices(self, pool: str | None = None) -> list[DeviceStatus]:
        return await self._do("list_devices", lambda: self._verbs.list_devices(pool))

    async def add_device(self, spec: DeviceSpec, *, by: str, audit: AuditEntry | None = None) -> DeviceStatus:
        return await self._do("add_device", lambda: self._verbs.add_device(spec, by=by, audit=audit))

    async def define_devices(self, specs: Sequence[DeviceSpec], *, by: str) -> list[DeviceStatus]:
        return await self._do("define_devices", lambda: self._verbs.define_devices(specs, by=by))

    async def command_device(
        self, name: str, command: DeviceCommand, *, by: str, audit: AuditEntry | None = None
    ) -> DeviceStatus:
        return await self._do(
            f"{type(command).__name__} {name}",
            lambda: self._verbs.command_device(name, command, by=by, audit=audit),
        )

    async def remove_device(
        self, name: str, *, force: bool = False, by: str = "", audit: AuditEntry | None = None
    ) -> None:
        await self._do(f"remove {name}", lambda: self._verbs.remove_device(name, force=force, by=by, audit=audit))

    async def serve_devices(self, node: str, names: Sequence[str]) -> list[str]:
        return await self._do("serve_devices", lambda: self._verbs.serve_devices(node, names))

    async def unserve_devices(self, node: str, names: Sequence[str]) -> None:
        await self._do("unserve_devices", lambda: self._verbs.unserve_devices(node, names))

    async def report_devices(self, node: str, reports: Sequence[DeviceReport]) -> list[str]:
        return await self._do("report_devices", lambda: self._verbs.report_devices(node, reports))

    async def list_quarantined_accounts(self, pool: str | None = None) -> list[QuarantinedAccount]:
        return await self._do("list_quarantined_accounts", lambda: self._verbs.list_quarantined_accounts(pool))

    async def quarantine_account(self, quarantined: QuarantinedAccount, *, audit: AuditEntry | None = None) -> None:
        await self._do("quarantine_account", lambda: self._verbs.quarantine_account(quarantined, audit=audit))

    async def release_account(
        self, pool: str, account: str, consumer: str | None, *, by: str, audit: AuditEntry | None = None
    ) -> int:
        return await self._do(
            f"release {account}", lambda: self._verbs.release_account(pool, account, consumer, by=by, audit=audit)
        )

    async def list_device_runs(
        self, where: RunFilter, *, limit: int = 100, before: tuple[int, int] | None = None
    ) -> list[tuple[tuple[int, int], DeviceRun]]:
        return await self._do(
            "list_device_runs", lambda: self._verbs.list_device_runs(where, limit=limit, before=before)
        )

    async def tally_device_runs(self, where: RunFilter, *, by_account: bool = False) -> list[RunTally]:
        return await self._do("tally_device_runs", lambda: self._verbs.tally_device_runs(where, by_account=by_account))


class CoreVerbs(DeviceVerbs):
    """The same verbs at the store. Its changes leave events, which the network tells of; the rest is looked at."""

    def __init__(self, core: MemoryCore) -> None:
        self._core = core

    def _tell(self) -> None:
        """The network does."""


def run_now(doing: Coroutine[Any, Any, T]) -> T:
    """The answer of a verb that awaits nothing."""
    try:
        doing.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    raise AssertionError("a verb of the memory store has awaited something")
