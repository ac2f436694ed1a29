"""The settings of a device pool, as a program gives them, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.definitions import DeviceDefinition
from taskyard.errors import DeviceExists, InvalidInput
from taskyard.model.given import check_count, check_name


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pool beside its devices. `auto_recover` is checked by the queue of the pool."""

    bucket_by: str | None = None
    """The label whose values have a line each; None means one line for all tasks."""
    heartbeat_s: float | None = None
    """Short for an `actor` that differs in this alone."""
    actor: ActorSettings | None = None
    """How each device is looked after."""
    auto_recover: int = 1
    """How often a task whose device was lost goes back to the head of the queue."""
    quarantine_account_after: int | None = 5
    """Failed runs in a row until tasks of that account and consumer are refused; None means never."""

    def __post_init__(self) -> None:
        if self.bucket_by is not None:
            check_name("bucket_by", self.bucket_by)
        if self.quarantine_account_after is not None:
            check_count("quarantine_account_after", self.quarantine_account_after, least=1)
        if self.actor is not None and not isinstance(self.actor, ActorSettings):
            raise InvalidInput("must be ActorSettings", field="actor", given=self.actor)
        if self.actor is not None and self.heartbeat_s is not None:
            raise InvalidInput(
                "must be in the settings of the actor if there are any: actor=ActorSettings(heartbeat_s=…)",
                field="heartbeat_s",
                given=self.heartbeat_s,
            )

    def for_actor(self) -> ActorSettings:
        """The settings of the actor of each device."""
        if self.heartbeat_s is not None:
            return ActorSettings(heartbeat_s=self.heartbeat_s)
        return self.actor or ActorSettings()


def check_devices(given: Any) -> dict[str, DeviceDefinition]:
    """The definitions by name. Two of one name, number or address are refused."""
    if isinstance(given, str | Mapping | DeviceDefinition) or not isinstance(given, Iterable):
        raise InvalidInput("must be a list of devices, such as [SimulatedDevice(1)]", field="devices", given=given)
    devices: dict[str, DeviceDefinition] = {}
    taken: dict[tuple[str, object], str] = {}
    for device in given:
        if not isinstance(device, DeviceDefinition):
            raise InvalidInput("must be a list of devices, such as [SimulatedDevice(1)]", field="devices", given=device)
        identity: list[tuple[str, object]] = [("name", device.name), ("number", device.number)]
        if device.address:
            identity.append((f"{device.adapter} address", device.address))
        for what, value in identity:
            if (what, value) in taken:
                raise DeviceExists(taken[what, value], what, value)
            taken[what, value] = device.name
        devices[device.name] = device
    return devices


def check_kinds(given: Any, devices: Iterable[DeviceDefinition]) -> tuple[type[DeviceDefinition], ...]:
    """The classes that a pool is given, then those of its devices."""
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise InvalidInput("must be a list of classes derived from DeviceDefinition", field="adapters", given=given)
    kinds = list(given)
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, DeviceDefinition):
            raise InvalidInput("must be a list of classes derived from DeviceDefinition", field="adapters", given=kind)
        check_name("the name of an adapter", getattr(kind, "adapter", ""))
    return tuple(dict.fromkeys([*kinds, *map(type, devices)]))
