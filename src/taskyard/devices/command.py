"""Devices that are reached by commands: GPUs, licences, lab machines."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from taskyard.devices.definitions import DeviceDefinition
from taskyard.devices.device_process import CannotStart, run_process
from taskyard.devices.device_settings import (
    LARGEST_OUTPUT,
    LARGEST_PULL,
    check_seconds,
    check_settings,
    command_failed,
    command_timed_out,
    read_source,
)
from taskyard.errors import DeviceError, DeviceLost, InvalidInput, quote
from taskyard.model.device import DeviceSpec
from taskyard.model.given import check_text

DEFAULT_TIMEOUT_S = 20.0
DEFAULT_RESTART_TIMEOUT_S = 300.0
"""Seconds: a server takes some minutes."""

RESTART_POLL_S = 1.0

SSH_FAILED = 255
"""The exit status of ssh if it does not reach the machine; a command there may end with it as well."""

NOTHING = "exit 0"
"""The command that tells these two cases apart: every shell knows it, that of Windows too."""

NOT_FOUND = 127
"""The exit status of a prefix that found no program of this name."""

_SETTINGS = ("prefix", "health", "restart_app", "restart", "timeout_s", "restart_timeout_s")


class CommandDevice(DeviceDefinition):
    """A device that is reached by running commands.

    `prefix` goes before each command: with `"ssh lab-3"`, the command is handed to ssh as one argument, and the shell
    of that machine reads it. Other prefixes are to read one argument likewise, as `"docker exec box sh -c"` does.
    Without a prefix, commands run on this machine: each is split into words as a shell would split it, and no shell
    runs it, so that `|`, `>` and `$HOME` are plain text; `sh -c '…'` has them. The prefix itself is split likewise.
    Behind a prefix no command may begin with `-`: ssh would take it for an option of its own. Commands do not get the
    variables `TASKYARD_…` of this process.

    `health` is a command that succeeds while the device works. `restart_app` runs as other commands do. `restart` runs
    on this machine, without the prefix; then the device is back when `health` succeeds, within `restart_timeout_s`. A
    health command, or a copy that makes no progress, is given up after `timeout_s`."""

    adapter = "command"

    def __init__(  # noqa: PLR0913 - how it is reached, each part with a name and a default
        self,
        number: int,
        *,
        health: str,
        prefix: str = "",
        name: str = "",
        labels: Mapping[str, str] | None = None,
        host: str = "",
        restart_app: str = "",
        restart: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        restart_timeout_s: float = DEFAULT_RESTART_TIMEOUT_S,
    ) -> None:
        super().__init__(number, name=name, labels=labels, host=host)
        self.prefix, self.health = check_text("prefix", prefix), check_text("health", health)
        self.restart_app, self.restart = check_text("restart_app", restart_app), check_text("restart", restart)
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.restart_timeout_s = check_seconds("restart_timeout_s", restart_timeout_s)
        for field in ("prefix", "health", "restart_app", "restart"):
            _check_command(field, getattr(self, field))
        for field in ("health", "restart_app"):
            if prefix and _looks_like_option(getattr(self, field)):
                raise InvalidInput(OPTION, field=field, given=getattr(self, field))
        if not health.strip():
            raise InvalidInput("must be a command that succeeds while the device works", field="health", given=health)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    @property
    def restart_app_s(self) -> float:
        return self.restart_timeout_s

    @property
    def restart_s(self) -> float:
        return self.restart_timeout_s

    @classmethod
    def from_spec(cls, spec: DeviceSpec) -> CommandDevice:
        settings = {"health": "", **check_settings(cls.adapter, spec.settings, _SETTINGS)}
        return cls(spec.number, name=spec.name, labels=spec.labels, host=spec.host, **settings)

    def make_adapter(self) -> CommandAdapter:
        return CommandAdapter(self)


class CommandAdapter:
    """Each call is a process group of its own, which is killed as a whole if the call is cancelled. A command that ssh
    has started on another machine is not part of it; it may go on there."""

    def __init__(self, device: CommandDevice) -> None:
        self._device = device
        self._is_connected = False

    async def connect(self) -> None:
        self._is_connected = True
        try:
            await self.health()
        except DeviceError:
            self._is_connected = False
            raise

    async def close(self) -> None:
        self._is_connected = False

    async def health(self) -> None:
        device = self._device
        try:
            await self._run(device.health, timeout_s=device.timeout_s)
        except CannotStart as error:
            raise DeviceLost(str(error)) from None
        except TimeoutError:
            limit_s = device.timeout_s
            raise DeviceLost(f"{device.name}: {quote(device.health)} did not end within {limit_s:g} s") from None

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        try:
            output = await self._run(command, timeout_s=timeout_s)
        except TimeoutError:
            raise command_timed_out(self._device.name, command, timeout_s) from None
        return output.decode(errors="replace").rstrip("\r\n")

    async def screenshot(self) -> bytes:
        self._refuse_screen()

    async def tap(self, x: int, y: int) -> None:
        self._refuse_screen()

    async def push(self, source: Path | bytes, target: str) -> None:
        content = await asyncio.to_thread(read_source, source) if isinstance(source, Path) else source
        folder = os.path.dirname(target)
        making = f"mkdir -p -- {shlex.quote(folder)} && " if folder else ""
        await self._run_in_shell(f"{making}cat > {shlex.quote(target)}", content)

    async def pull(self, source: str) -> bytes:
        return await self._run_in_shell(f"cat -- {shlex.quote(source)}", most=LARGEST_PULL)

    async def restart_app(self) -> None:
        if not self._device.restart_app:
            raise DeviceError(
                f"{self._device.name} has no command to restart its app; give CommandDevice restart_app=…"
            )
        await self.shell(self._device.restart_app, timeout_s=self._device.restart_timeout_s)

    async def restart(self) -> None:
        device = self._device
        if not device.restart:
            raise DeviceError(f"{device.name} has no command to restart it; give CommandDevice restart=…")
        try:
            async with asyncio.timeout(device.restart_timeout_s):
                status, output, errors = await self._start(shlex.split(device.restart))
                if status:
                    raise command_failed(device.name, device.restart, status, _text(errors or output))
                await self._wait_until_healthy()
        except TimeoutError:
            raise DeviceLost(f"{device.name} is not back within {device.restart_timeout_s:g} s; look at it") from None

    async def _wait_until_healthy(self) -> None:
        while True:
            try:
                return await self.connect()
            except DeviceError:
                await asyncio.sleep(RESTART_POLL_S)

    def _refuse_screen(self) -> NoReturn:
        raise DeviceError(f"{self._device.name} has no screen: it is reached by commands alone")

    async def _run_in_shell(self, script: str, content: bytes = b"", *, most: int = LARGEST_OUTPUT) -> bytes:
        """A script that needs a shell: behind a prefix there is one already."""
        command = script if self._device.prefix else shlex.join(["sh", "-c", script])
        idle_s = self._device.timeout_s
        try:
            return await self._run(command, content=content, idle_s=idle_s, most=most)
        except TimeoutError:
            raise DeviceLost(f"{self._device.name}: {quote(script)} made no progress for {idle_s:g} s") from None

    async def _run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        idle_s: float | None = None,
        content: bytes = b"",
        most: int = LARGEST_OUTPUT,
    ) -> bytes:
        """What a command wrote. `TimeoutError` if it takes longer, or makes no progress for `idle_s`."""
        device = self._device
        if not self._is_connected:
            raise DeviceLost(f"{device.name} is not connected; connect first")
        words = self._split(command)
        if not words:
            return b""
        async with asyncio.timeout(timeout_s):
            status, output, errors = await self._start(words, content, idle_s=idle_s, most=most)
        if status == SSH_FAILED and os.path.basename(words[0]) == "ssh":
            await self._check_ssh()
        if status:
            hint = _prefix_hint(shlex.split(device.prefix), command) if status == NOT_FOUND else ""
            raise command_failed(device.name, command, status, _text(errors or output), hint=hint)
        return output

    def _split(self, command: str) -> list[str]:
        """The words of the process that runs it; none if there is nothing to run."""
        device = self._device
        if device.prefix and _looks_like_option(command):
            raise DeviceError(f"{device.name}: {quote(command)} {OPTION}")
        try:
            return [*shlex.split(device.prefix), command] if device.prefix else shlex.split(command)
        except ValueError as error:
            raise DeviceError(f"{device.name}: {quote(command)} is no command line: {error}") from None

    async def _start(
        self, words: list[str], content: bytes = b"", *, idle_s: float | None = None, most: int = LARGEST_OUTPUT
    ) -> tuple[int, bytes, bytes]:
        name = self._device.name
        try:
            return await run_process(words, content, idle_s=idle_s, most=most)
        except CannotStart as error:
            # Without a prefix it is the command that names a program which is not there.
            kind = DeviceLost if self._device.prefix else CannotStart
            raise kind(f"{name}: {error}") from None
        except DeviceError as error:
            raise DeviceError(f"{name}: {error}") from None

    async def _check_ssh(self) -> None:
        """A `DeviceLost` if ssh does not reach the machine now."""
        name, limit_s = self._device.name, self._device.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                status, output, errors = await self._start([*shlex.split(self._device.prefix), NOTHING])
        except TimeoutError:
            raise DeviceLost(f"{name}: ssh has not reached it within {limit_s:g} s") from None
        if status == SSH_FAILED:
            raise DeviceLost(f"{name}: ssh does not reach it: {_text(errors or output)}")


OPTION = "begins with -, which the program of the prefix would take for an option; begin with the name of a program"


def _looks_like_option(command: str) -> bool:
    return command.lstrip().startswith("-")


def _prefix_hint(prefix: list[str], command: str) -> str:
    """What to write if a prefix took the whole command for the name of a program."""
    has_shell = not prefix or prefix[-1].startswith("-") or os.path.basename(prefix[0]) == "ssh"
    if has_shell or len(command.split()) < 2:
        return ""
    return (
        "the prefix gets the whole command as one argument; let it end in a shell, "
        f"such as {quote(shlex.join([*prefix, 'sh', '-c']))}"
    )


def _check_command(field: str, command: str) -> None:
    try:
        shlex.split(command)
    except ValueError as error:
        raise InvalidInput(f"is no command line: {error}", field=field, given=command) from None


def _text(output: bytes) -> str:
    return output.decode(errors="replace").strip()
