"""A flag that crosses processes."""

from __future__ import annotations

import asyncio
import os


class Pipe:
    """A named pipe that this process holds open at both ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._is_set = False

    def is_set(self) -> bool:
        try:
            self._is_set = self._is_set or bool(os.read(self._fd, 1))
        except BlockingIOError:
            return False
        return self._is_set

    async def wait(self) -> None:
        """Until somebody has written, without looking again and again."""
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, written.set)
        try:
            while not self.is_set():
                written.clear()
                await written.wait()
        finally:
            loop.remove_reader(self._fd)

    def write(self) -> None:
        os.write(self._fd, b"!")

    def close(self) -> None:
        os.close(self._fd)
