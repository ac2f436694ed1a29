"""The ports of devices: how one is reached, and what a store keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from taskyard.model.audit import AuditEntry
from taskyard.model.device import (
    DeviceCommand,
    DeviceHealth,
    DeviceRun,
    DeviceSpec,
    DeviceStatus,
    QuarantinedAccount,
    RunFilter,
    RunTally,
)


class DeviceAdapter(Protocol):
    """The connection to one device. It belongs to one event loop, and is used by one task at a time, save for `health`,
    which may be asked meanwhile.

    No method may block the event loop: a blocking library is called in a thread of this device alone, since a device
    that hangs must not hold up others. Every method may be cancelled at any time, and the adapter is usable afterwards.
    What goes wrong is a `DeviceError`: `DeviceLost` if the device is gone or does not answer, so that its task is to be
    sent to another one; a plain `DeviceError` if it answered that it cannot do this."""

    async def connect(self) -> None:
        """Reach the device. Connected already, it connects anew."""
        ...

    async def close(self) -> None:
        """Let go of it. Never raises."""
        ...

    async def health(self) -> None:
        """Return if the device answers and is able to work; raise a `DeviceError` that says what is wrong."""
        ...

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        """Run a command on the device; its output without the line ends at its end. An exit status other than 0 is a
        plain `DeviceError`, and so is a command that has not ended after `timeout_s`: it may simply take long, and
        `health`, which may be asked meanwhile, tells whether the device is lost."""
        ...

    async def screenshot(self) -> bytes:
        """The screen as a PNG."""
        ...

    async def tap(self, x: int, y: int) -> None:
        """Touch the screen, in pixels of a screenshot."""
        ...

    async def push(self, source: Path | bytes, target: str) -> None:
        """Copy a file, or these bytes, to the device. Folders are made, and a file that is there is replaced."""
        ...

    async def pull(self, source: str) -> bytes:
        """The content of a file of the device; a plain `DeviceError` if there is none."""
        ...

    async def restart_app(self) -> None:
        """End what the tasks use, such as the app of the settings, and start it again."""
        ...

    async def restart(self) -> None:
        """Restart the device itself, and return when it can be connected to. It has to be, before anything else."""
        ...


EmulatorAdapter = DeviceAdapter
"""Its name in the source design."""


class DeviceReport(msgspec.Struct, frozen=True):
    """What the node that serves a device says of it now."""

    name: str
    health: DeviceHealth


@runtime_checkable
class DeviceStore(Protocol):
    """A store that keeps devices. Every verb is one transaction; one that changes something writes its event, and its
    `audit` entry if it is given one."""

    async def device_stamp(self) -> int:
        """Grows with every change of a definition, of orders, of quarantined accounts or of who serves what: cheap to
        ask every second. Reports of health do not count."""
        ...

    async def list_devices(self, pool: str | None = None) -> list[DeviceStatus]:
        """By pool, number and name."""
        ...

    async def add_device(self, spec: DeviceSpec, *, by: str, audit: AuditEntry | None = None) -> DeviceStatus:
        """`DeviceExists` if a device has this name, or in its pool this number, or for its adapter this address."""
        ...

    async def define_devices(self, specs: Sequence[DeviceSpec], *, by: str) -> list[DeviceStatus]:
        """What a program says when it starts: each is added, or, if it was defined by code, brought up to date. Labels,
        settings, the address and the host that a person has edited stay. `DeviceExists` if one of them collides with
        another device, such as one of its name in another pool or one that was not defined by code, and then none is
        changed. Orders stay as they are. The answer is in the order of `specs`."""
        ...

    async def command_device(
        self, name: str, command: DeviceCommand, *, by: str, audit: AuditEntry | None = None
    ) -> DeviceStatus:
        """Carry out what somebody asks of a device; `UnknownDevice` if there is none of that name. An edit may be a
        `DeviceExists`."""
        ...

    async def remove_device(
        self, name: str, *, force: bool = False, by: str = "", audit: AuditEntry | None = None
    ) -> None:
        """Forget the device; its runs stay in the history. `UnknownDevice` if there is none; `DeviceBusy` if a task
        runs on it and `force` is not given, as far as that is seen: a claim may commit just after."""
        ...

    async def serve_devices(self, node: str, names: Sequence[str]) -> list[str]:
        """From now on `node` serves these, as far as no other living node does; those that it serves. A node that has
        died, or is not among the nodes, serves none. Served anew, a device is down until its first report. A dead node
        keeps its devices until it is rescued."""
        ...

    async def unserve_devices(self, node: str, names: Sequence[str]) -> None:
        """The node lets go of these. A node that leaves, and one that is rescued, lets go of all. A device that was up
        has gone down by it."""
        ...

    async def report_devices(self, node: str, reports: Sequence[DeviceReport]) -> list[str]:
        """Write what the node says of devices that it serves; the names of those that it does not serve, for which
        nothing is written. A device that has come up or gone down leaves an event."""
        ...

    async def list_quarantined_accounts(self, pool: str | None = None) -> list[QuarantinedAccount]: ...

    async def quarantine_account(self, quarantined: QuarantinedAccount, *, audit: AuditEntry | None = None) -> None:
        """Take no more tasks of this account and consumer. A second time it stays as it was first said."""
        ...

    async def release_account(
        self, pool: str, account: str, consumer: str | None, *, by: str, audit: AuditEntry | None = None
    ) -> int:
        """Take tasks of this account again, of one consumer or of all; how many were quarantined."""
        ...

    async def list_device_runs(
        self, where: RunFilter, *, limit: int = 100, before: tuple[int, int] | None = None
    ) -> list[tuple[tuple[int, int], DeviceRun]]:
        """The attempts on devices, newest first, those that run included, each with its place in this order; go on with
        `before` that of the last one seen. Attempts are kept as long as their task: of a task that was pruned nothing
        is left here."""
        ...

    async def tally_device_runs(self, where: RunFilter, *, by_account: bool = False) -> list[RunTally]:
        """How the runs that have ended did, by device, or by account, in the order of the names. It counts only
        attempts whose task is still kept, as the list does."""
        ...
