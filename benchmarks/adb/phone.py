"""The emulated device that all sides use, in a process of its own: `python -m benchmarks.adb.phone`. It says its serial
and ends when its standard input does."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from taskyard.devices import SimulatedDevice
from taskyard.testing.adb_device import EmulatedAdbDevice
from taskyard.testing.adb_server import AdbServer

SCREENSHOT_BYTES = 1_000_000
"""As large as that of a phone."""


@contextmanager
def phone_and_server() -> Iterator[tuple[str, AdbServer]]:
    """The serial of the device, and a server of its own that is connected to it."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    server = AdbServer()
    try:
        assert process.stdout is not None
        serial = process.stdout.readline().strip()
        server.start()
        server.adb("connect", serial)
        yield serial, server
    finally:
        server.stop()
        process.communicate()


async def _serve() -> None:
    phone = SimulatedDevice(1)
    # Drawing would take longer than all the rest.
    image = b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(SCREENSHOT_BYTES) + b"IEND\xaeB\x60\x82"
    phone.draw = lambda: image  # type: ignore[method-assign]
    async with EmulatedAdbDevice(phone) as device:
        print(device.serial, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve())
