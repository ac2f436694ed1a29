"""What every adapter of a device must do, sentence by sentence of `taskyard.ports.device.DeviceAdapter`.

    class TestMyAdapter(DeviceContract):
        @pytest.fixture
        async def device(self) -> AsyncIterator[DeviceUnderTest]: ...

The fixture has an adapter that is not connected yet, and makes its device hang and vanish.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, Protocol

import pytest

from taskyard.errors import DeviceError, DeviceLost
from taskyard.ports.device import DeviceAdapter

PATIENCE_S = 20.0
"""Seconds: how long a call that should end may take on a busy machine."""

SHORT_S = 0.2
"""Seconds: how long a call that should not end is watched."""

LONGEST_STALL_S = 0.5
"""Seconds: a loop that cannot run anything for so long is blocked, and not merely slow."""

LARGE = bytes(range(256)) * 20_000
"""5 MB with every byte in it."""


class DeviceUnderTest(Protocol):
    adapter: DeviceAdapter

    async def hang(self) -> None:
        """From now on the device answers nothing; connections to it stay."""
        ...

    async def unhang(self) -> None:
        """It answers again."""
        ...

    async def disconnect(self) -> None:
        """The device is gone, and what is under way on it ends."""
        ...

    async def reconnect(self) -> None:
        """It may be connected to again."""
        ...


class DeviceContract:
    """The attributes say what the device has, and which commands its shell knows."""

    has_screen = True
    folder = "/sdcard/taskyard"
    """A folder of the device in which files may be written. It need not exist."""
    says_hello = "echo hello"
    fails = "false"
    """A command with the exit status 1."""
    takes_long = "sleep 600"
    counts = "seq 100000"
    """A command that writes the numbers to 100,000, each in a line."""

    @pytest.fixture
    async def adapter(self, device: DeviceUnderTest) -> AsyncIterator[DeviceAdapter]:
        await device.adapter.connect()
        yield device.adapter
        await device.adapter.close()

    # --- connections --------------------------------------------------------------------------------------------------

    async def test_nothing_works_before_it_is_connected(self, device: DeviceUnderTest) -> None:
        """A call of an adapter that is not connected is a `DeviceLost`."""
        with pytest.raises(DeviceLost):
            await device.adapter.health()
        with pytest.raises(DeviceLost):
            await device.adapter.shell(self.says_hello)

    async def test_a_device_that_works_is_healthy(self, adapter: DeviceAdapter) -> None:
        """`health` returns once the device is connected, and the device does what it is told."""
        await adapter.health()
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_it_can_be_connected_anew(self, adapter: DeviceAdapter) -> None:
        """Connecting again, and connecting after `close`, both work; closing twice does no harm."""
        await adapter.connect()
        assert await adapter.shell(self.says_hello) == "hello"
        await adapter.close()
        await adapter.close()
        with pytest.raises(DeviceLost):
            await adapter.shell(self.says_hello)
        await adapter.connect()
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_a_device_that_is_gone_is_lost(self, device: DeviceUnderTest, adapter: DeviceAdapter) -> None:
        """Every call, `connect` too, is a `DeviceLost` until the device is back and has been connected to."""
        await device.disconnect()
        for call in (adapter.health, adapter.connect, adapter.health):
            with pytest.raises(DeviceLost):
                await call()
        with pytest.raises(DeviceLost):
            await adapter.shell(self.says_hello)
        await device.reconnect()
        await adapter.connect()
        await adapter.health()

    async def test_losing_the_device_ends_what_runs_on_it(
        self, device: DeviceUnderTest, adapter: DeviceAdapter
    ) -> None:
        """A command whose device vanishes ends with a `DeviceLost`, well before its timeout."""
        running = asyncio.create_task(adapter.shell(self.takes_long, timeout_s=600))
        assert not await _ends(running, SHORT_S)
        await device.disconnect()
        assert await _ends(running, PATIENCE_S)
        assert isinstance(running.exception(), DeviceLost)

    # --- shell --------------------------------------------------------------------------------------------------------

    async def test_a_command_answers_with_its_output(self, adapter: DeviceAdapter) -> None:
        """The output comes without the line ends at its end."""
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_much_output_is_whole(self, adapter: DeviceAdapter) -> None:
        """Half a megabyte comes as it was written."""
        assert (await adapter.shell(self.counts)).split() == [str(number) for number in range(1, 100_001)]

    async def test_a_failed_command_is_an_error_of_the_device(self, adapter: DeviceAdapter) -> None:
        """An exit status other than 0 is a `DeviceError` that tells it; the device is not lost, and goes on."""
        with pytest.raises(DeviceError, match="status 1") as caught:
            await adapter.shell(self.fails)
        assert not isinstance(caught.value, DeviceLost)
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_a_command_that_takes_too_long_is_an_error_of_the_device(self, adapter: DeviceAdapter) -> None:
        """After `timeout_s` a command is a `DeviceError`; whether the device is lost is for `health` to say."""
        with pytest.raises(DeviceError, match=r"0\.2 s") as caught:
            await adapter.shell(self.takes_long, timeout_s=SHORT_S)
        assert not isinstance(caught.value, DeviceLost)
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_health_does_not_wait_for_a_command(self, adapter: DeviceAdapter) -> None:
        """A device that works for a long time answers `health` meanwhile."""
        running = asyncio.create_task(adapter.shell(self.takes_long, timeout_s=600))
        assert not await _ends(running, SHORT_S)
        await adapter.health()
        assert not running.done()
        await _cancel(running)

    # --- hangs and cancellation ---------------------------------------------------------------------------------------

    @pytest.mark.spec("DEV-08")
    async def test_a_device_that_hangs_does_not_block_the_loop(
        self, device: DeviceUnderTest, adapter: DeviceAdapter
    ) -> None:
        """While calls wait for a device that answers nothing, the event loop runs other things."""
        await device.hang()
        waiting = [asyncio.create_task(call) for call in (adapter.health(), adapter.pull(f"{self.folder}/file"))]
        stall_s = await _longest_stall()
        ended = [task for task in waiting if task.done()]
        for task in waiting:
            await _cancel(task)
        await device.unhang()
        assert stall_s < LONGEST_STALL_S
        assert not ended

    @pytest.mark.parametrize("name", ["connect", "health", "shell", "screenshot", "tap", "push", "pull", "restart_app"])
    async def test_a_call_that_hangs_may_be_cancelled(
        self, device: DeviceUnderTest, adapter: DeviceAdapter, name: str
    ) -> None:
        """A cancelled call ends at once, though the device hangs; the adapter is usable when the device is."""
        await device.hang()
        running = asyncio.create_task(self._call(adapter, name))
        await _ends(running, SHORT_S)
        began = time.monotonic()
        await _cancel(running)
        took_s = time.monotonic() - began
        await device.unhang()
        assert took_s < LONGEST_STALL_S
        await adapter.connect()
        await adapter.health()
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_cancelled_commands_leave_it_usable(self, adapter: DeviceAdapter) -> None:
        """At whatever moment commands are cancelled, the next one works without connecting anew."""
        for steps in range(30):
            running = asyncio.create_task(adapter.shell(self.takes_long, timeout_s=600))
            for _ in range(steps):
                await asyncio.sleep(0)
            await _cancel(running)
            running = asyncio.create_task(adapter.shell(self.takes_long, timeout_s=600))
            await _ends(running, SHORT_S / 200 * steps)
            await _cancel(running)
        assert await adapter.shell(self.says_hello) == "hello"
        await adapter.health()

    # --- screen -------------------------------------------------------------------------------------------------------

    async def test_a_screenshot_is_a_png(self, adapter: DeviceAdapter) -> None:
        """A device with a screen shows it and takes taps; one without says that it has none."""
        if self.has_screen:
            assert (await adapter.screenshot()).startswith(b"\x89PNG\r\n\x1a\n")
            await adapter.tap(10, 20)
            return
        with pytest.raises(DeviceError, match="no screen"):
            await adapter.screenshot()
        with pytest.raises(DeviceError, match="no screen"):
            await adapter.tap(10, 20)

    # --- files --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("content", [b"", b"\x00\r\n\xff", LARGE], ids=["empty", "binary", "large"])
    async def test_a_file_comes_back_as_it_was_pushed(self, adapter: DeviceAdapter, content: bytes) -> None:
        """Every byte of a file is kept, in a folder that is made for it, with blanks and quotes in its name."""
        target = f"{self.folder}/new folder/it's a file"
        await adapter.push(content, target)
        assert await adapter.pull(target) == content

    async def test_a_file_of_this_machine_is_pushed(self, adapter: DeviceAdapter, tmp_path: Path) -> None:
        """A path is read here, and replaces a file that the device already has."""
        (tmp_path / "file").write_bytes(b"new")
        await adapter.push(b"older and longer", f"{self.folder}/file")
        await adapter.push(tmp_path / "file", f"{self.folder}/file")
        assert await adapter.pull(f"{self.folder}/file") == b"new"

    async def test_a_file_that_is_missing_is_an_error_of_the_device(
        self, adapter: DeviceAdapter, tmp_path: Path
    ) -> None:
        """Whether it is missing here or there, the error is a `DeviceError` that names it; the device is not lost."""
        for call in (adapter.pull(f"{self.folder}/missing"), adapter.push(tmp_path / "missing", f"{self.folder}/file")):
            with pytest.raises(DeviceError, match="missing") as caught:
                await call
            assert not isinstance(caught.value, DeviceLost)
        await adapter.health()

    # --- restart ------------------------------------------------------------------------------------------------------

    async def test_it_can_be_connected_to_after_a_restart(self, adapter: DeviceAdapter) -> None:
        """When `restart` returns, the device takes connections and works."""
        await adapter.restart()
        await adapter.connect()
        await adapter.health()
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_its_app_restarts(self, adapter: DeviceAdapter) -> None:
        """The device works after `restart_app`, without connecting anew."""
        await adapter.restart_app()
        assert await adapter.shell(self.says_hello) == "hello"

    async def test_it_has_every_method_of_the_port(self, device: DeviceUnderTest) -> None:
        """All methods of the port are there, and are coroutine functions."""
        names = [name for name in vars(DeviceAdapter) if not name.startswith("_")]
        assert names
        for name in names:
            assert inspect.iscoroutinefunction(getattr(device.adapter, name)), name

    async def _call(self, adapter: DeviceAdapter, name: str) -> Any:
        arguments: dict[str, tuple[Any, ...]] = {
            "shell": (self.says_hello,),
            "tap": (10, 20),
            "push": (LARGE, f"{self.folder}/file"),
            "pull": (f"{self.folder}/file",),
        }
        call: Awaitable[Any] = getattr(adapter, name)(*arguments.get(name, ()))
        return await call


async def _ends(task: asyncio.Task[Any], within_s: float) -> bool:
    done, _ = await asyncio.wait([task], timeout=within_s)
    return bool(done)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    # It may have ended by itself, with an error of the device.
    await asyncio.gather(task, return_exceptions=True)


async def _longest_stall() -> float:
    """For how long the loop did not run in the meantime, at most."""
    longest_s, until = 0.0, time.monotonic() + SHORT_S
    while (before := time.monotonic()) < until:
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.monotonic() - before)
    return longest_s
