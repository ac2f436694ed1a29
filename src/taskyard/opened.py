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

    def __init__(self) -> None:
        self._store: Store | None = None
        self._engine: Engine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._forks = self._ident = 0

    def _opened(self, store: Store, engine: Engine) -> asyncio.AbstractEventLoop:
        """By whoever calls."""
        self._store, self._engine, self.loop = store, engine, asyncio.get_running_loop()
        self._forks, self._ident = _forks, get_ident()
        return self.loop

    def _closed(self) -> None:
        self._engine = self._store = self.loop = None

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    @property
    def store(self) -> Store:
        if self._store is None:
            raise NotOpen("the yard is not open; use it inside `async with yard:`")
        self._refuse_elsewhere()
        return self._store

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise NotOpen("the yard is not open; use it inside `async with yard:`")
        # Asked on every submit. On the thread of a loop that runs, it is that loop which runs: asking asyncio which one
        # does would cost a system call.
        if self._forks != _forks or get_ident() != self._ident or self.loop is None or not self.loop.is_running():
            self._refuse_elsewhere()
        return self._engine

    def _refuse_elsewhere(self) -> None:
        """Whoever is in another process or on another event loop would wait for ever, or harm this one."""
        self.refuse_fork()
        running = asyncio._get_running_loop()
        if running is not None and running is not self.loop:
            raise WrongLoop

    def refuse_fork(self) -> None:
        """`ForkedStore` in a forked child: the loops did not come along, and a call would wait for them for ever."""
        if self._engine is not None and self._forks != _forks:
            raise ForkedStore
