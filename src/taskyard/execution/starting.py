"""Where workers come from, whoever starts them: what a pool asks for, what it gets, and what it hears of their end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

LOST = -1
"""The status of a worker whose end nobody saw: its keeper was killed, there was no process for one of them, or the host
ignores SIGCHLD."""


def ended(status: int) -> str:
    """What a wait status says, in words."""
    if status == LOST:
        return "was lost"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "a signal"
        return f"was ended by {name} ({number})"
    return f"exited with code {os.WEXITSTATUS(status)}"


class WorkerHandle(Protocol):
    """A worker's process, as its pool sees it. `on_gone` is called once, on the loop, when the process and everything
    it started are gone, with its wait status. If `watch` raises, the process is being ended, and its wire is closed.
    `terminate` and `kill` may be called at any time, and more than once."""

    wire: socket.socket

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Starter(Protocol):
    """Where workers come from: the nursery, or the spawner. What they are to be, they are told over their wire."""

    def spawn(self, preload: tuple[str, ...] = ()) -> WorkerHandle:
        """One that is starting. `preload`: modules that it may have in advance; those it has not it imports."""
        ...
