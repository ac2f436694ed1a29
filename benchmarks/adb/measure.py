"""One operation of an Android device, p50: through our adapter, and through adbutils alone."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import adbutils
import uvloop

from benchmarks.adb.phone import SCREENSHOT_BYTES, phone_and_server
from benchmarks.reading import Reading, percentile
from taskyard.devices import AdbDevice
from taskyard.ports.device import DeviceAdapter

WARM_UP = 5
FILE = bytes(range(256)) * 20_000
TARGET = "/sdcard/file"

# How each side does an operation, and whether what it answers is right.
OURS: dict[str, Callable[[DeviceAdapter], Awaitable[Any]]] = {
    "shell": lambda device: device.shell("echo hello"),
    "tap": lambda device: device.tap(10, 20),
    "screenshot": lambda device: device.screenshot(),
    "push": lambda device: device.push(FILE, TARGET),
    "pull": lambda device: device.pull(TARGET),
}
ADBUTILS: dict[str, Callable[[Any], Any]] = {
    "shell": lambda device: _checked(device.shell2("echo hello", v2=True, rstrip=True)),
    "tap": lambda device: device.click(10, 20),
    "screenshot": lambda device: device.shell(["screencap", "-p"], encoding=None),
    "push": lambda device: device.sync.push(FILE, TARGET),
    "pull": lambda device: device.sync.read_bytes(TARGET),
}
IS_RIGHT: dict[str, Callable[[Any], bool]] = {
    "shell": lambda answer: answer == "hello",
    "tap": lambda answer: answer is None,
    "screenshot": lambda answer: len(answer) > SCREENSHOT_BYTES,
    "push": lambda answer: answer in (None, len(FILE)),
    "pull": lambda answer: answer == FILE,
}


def ours(folder: Path, operation: str, count: int) -> Reading:
    with phone_and_server() as (serial, server):
        definition = AdbDevice(1, serial=serial, server_host="127.0.0.1", server_port=server.port)
        return uvloop.run(_ours(definition.make_adapter(), operation, count))


async def _ours(device: DeviceAdapter, operation: str, count: int) -> Reading:
    await device.connect()
    await device.push(FILE, TARGET)
    operate, times, right = OURS[operation], [], 0
    for _ in range(count + WARM_UP):
        began = time.perf_counter()
        answer = await operate(device)
        times.append(time.perf_counter() - began)
        right += IS_RIGHT[operation](answer)
    await device.close()
    return Reading(percentile(times[WARM_UP:], 50), given=count, held=right - WARM_UP)


def bare(folder: Path, operation: str, count: int, without_waits: bool = False) -> Reading:
    """adbutils, called from a program that does nothing else; also without the 10 ms that it waits for each connection
    that it closes."""
    if without_waits:
        adbutils.AdbConnection.close = _close_at_once
    with phone_and_server() as (serial, server):
        device = adbutils.AdbClient("127.0.0.1", server.port).device(serial)
        device.sync.push(FILE, TARGET)
        operate, times, right = ADBUTILS[operation], [], 0
        for _ in range(count + WARM_UP):
            began = time.perf_counter()
            answer = operate(device)
            times.append(time.perf_counter() - began)
            right += IS_RIGHT[operation](answer)
    return Reading(percentile(times[WARM_UP:], 50), given=count, held=right - WARM_UP)


def _close_at_once(connection: Any) -> None:
    connection.conn.close()


def _checked(done: Any) -> str:
    """As our adapter, which checks the exit status."""
    if done.returncode:
        raise RuntimeError(f"{done.command} ended with status {done.returncode}")
    output: str = done.output
    return output
