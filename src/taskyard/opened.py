"""What a yard has while it is open, and who may use it: the process, the thread and the event loop that opened it."""

from __future__ import annotations

import asyncio
import os
from threading import get_ident

from taskyard.engine import Engine
from taskyard.errors import ForkedStore, NotOpen, WrongLoop
from taskyard.ports.store import Store

_forks = 0
"""How many forks lie between the first process and this one: `os.getpid()` on every submit would cost a system call."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Opened:
    """The store and the engine of a yard, handed out only where they work."""

    _called = "yard"
    """Its name in errors: users of an `ExecutorService` have no yard."""

    def __init__(self) -> None:
        self._open_store: Store | None = None
        self._open_engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = self._ident = 0

    def _opened(self, store: Store, engine: Engine) -> asyncio.AbstractEventLoop:
        """By whoever calls."""
        self._open_store, self._open_engine, self._loop = store, engine, asyncio.get_running_loop()
        self._forks, self._ident = _forks, get_ident()
        return self._loop

    def _closed(self) -> None:
        self._open_engine = self._open_store = self._loop = None

    @property
    def is_open(self) -> bool:
        """Whether the yard has a store open in this process."""
        return self._open_engine is not None

    @property
    def store(self) -> Store:
        """The open store, for tools that read it (`taskyard.ports.store`)."""
        if self._open_store is None:
            raise self._not_open()
        self._refuse_elsewhere()
        return self._open_store

    @property
    def _engine(self) -> Engine:
        if self._open_engine is None:
            raise self._not_open()
        # Asked on every submit. On the thread of a loop that runs, it is that loop which runs: asking asyncio which one
        # does would cost a system call.
        if self._forks != _forks or get_ident() != self._ident or self._loop is None or not self._loop.is_running():
            self._refuse_elsewhere()
        return self._open_engine

    def _not_open(self) -> NotOpen:
        return NotOpen(f"the {self._called} is not open; use it inside `async with {self._called}:`")

    def _refuse_elsewhere(self) -> None:
        """Whoever is in another process or on another event loop would wait for ever, or harm this one."""
        self._refuse_fork()
        running = asyncio._get_running_loop()
        if running is not None and running is not self._loop:
            raise WrongLoop

    def _refuse_fork(self) -> None:
        """`ForkedStore` in a forked child: the loops did not come along, and a call would wait for them for ever."""
        if self._open_engine is not None and self._forks != _forks:
            raise ForkedStore
