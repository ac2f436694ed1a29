"""The work on a device as a list of steps, for a consumer that needs no code: `[Tap("start"), WaitFor("lobby")]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from taskyard.devices.device import WAIT_TIMEOUT_S, Device
from taskyard.devices.device_settings import check_seconds
from taskyard.devices.templates import Template, find_template
from taskyard.errors import InvalidInput, quote
from taskyard.model.attempt import check_artifact_name
from taskyard.model.given import check_text


class DeviceStep(ABC):
    """One step. With `optional=True` it may fail, and the next one follows."""

    optional: bool

    async def run(self, device: Device) -> None:
        if not self.optional:
            await self.act(device)
            return
        with device.optional():
            await self.act(device)

    @abstractmethod
    async def act(self, device: Device) -> None:
        """Do it."""

    @abstractmethod
    def check(self, templates: Mapping[str, Template]) -> None:
        """Raise `InvalidInput` if it can never work."""


@dataclass(frozen=True)
class Tap(DeviceStep):
    """Wait until a template is on the screen, and touch its middle; or touch `Tap(at=(x, y))`."""

    template: str | Template | None = None
    at: tuple[int, int] | None = None
    timeout_s: float = WAIT_TIMEOUT_S
    optional: bool = False

    async def act(self, device: Device) -> None:
        if self.template is not None:
            await device.tap_when(self.template, timeout_s=self.timeout_s)
        elif self.at is not None:
            await device.tap(*self.at)

    def check(self, templates: Mapping[str, Template]) -> None:
        if (self.template is None) == (self.at is None):
            raise InvalidInput("Tap needs either a template or at=(x, y)")
        check_seconds("timeout_s", self.timeout_s)
        if self.template is not None:
            find_template(self.template, templates)
        elif self.at is not None:
            _check_point(self.at)


@dataclass(frozen=True)
class WaitFor(DeviceStep):
    """Wait until a template is on the screen."""

    template: str | Template
    timeout_s: float = WAIT_TIMEOUT_S
    optional: bool = False

    async def act(self, device: Device) -> None:
        await device.wait_for(self.template, timeout_s=self.timeout_s)

    def check(self, templates: Mapping[str, Template]) -> None:
        check_seconds("timeout_s", self.timeout_s)
        find_template(self.template, templates)


@dataclass(frozen=True)
class WaitGone(DeviceStep):
    """Wait until a template is not on the screen."""

    template: str | Template
    timeout_s: float = WAIT_TIMEOUT_S
    optional: bool = False

    async def act(self, device: Device) -> None:
        await device.wait_gone(self.template, timeout_s=self.timeout_s)

    def check(self, templates: Mapping[str, Template]) -> None:
        check_seconds("timeout_s", self.timeout_s)
        find_template(self.template, templates)


@dataclass(frozen=True)
class Shell(DeviceStep):
    """Run a command on the device."""

    command: str
    timeout_s: float = 30.0
    optional: bool = False

    async def act(self, device: Device) -> None:
        await device.shell(self.command, timeout_s=self.timeout_s)

    def check(self, templates: Mapping[str, Template]) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_text("command", self.command)


@dataclass(frozen=True)
class Screenshot(DeviceStep):
    """Keep a screenshot as the artifact `<name>.png`."""

    name: str
    optional: bool = False

    async def act(self, device: Device) -> None:
        await device.screenshot(name=self.name)

    def check(self, templates: Mapping[str, Template]) -> None:
        check_artifact_name(f"{self.name}.png")


def _check_point(point: Any) -> None:
    if not isinstance(point, tuple) or len(point) != 2 or not all(isinstance(number, int) for number in point):
        raise InvalidInput("must be x and y in pixels", field="at", given=point)


def check_steps(steps: Iterable[Any], templates: Mapping[str, Template]) -> None:
    """Raise `InvalidInput` that names the first step that can never work."""
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, DeviceStep):
            raise InvalidInput(f"step {number} must be a Tap, WaitFor, WaitGone, Shell or Screenshot", given=step)
        try:
            step.check(templates)
        except InvalidInput as exc:
            raise InvalidInput(f"step {number}, {quote(step)}: {exc}") from None
