"""Who may connect, and when. In times of trouble one asks first, and what comes of it is told to all who wait."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import TypeVar

from taskyard.errors import StoreError

T = TypeVar("T")

APART_S = 0.9
"""Between two tries while nobody gets through, and up to a third more, drawn by lot: the nodes shall not come all at
once. One that gets no answer does not keep the next waiting: packets may have been lost, and be lost no more."""

WINDOW_S, MOST = 10.0, 13
"""So many tries in so many seconds of trouble, with those that got through: together with the beats, which have a
connection of their own, fewer than two a second."""

CALM_AFTER_S = 10.0
"""So long after the last trouble connections are opened at once again."""


class Rank(IntEnum):
    """Who goes first when not all may."""

    WORK = 0
    HINTS = 1  # a look once a second stands behind them


class Gate:
    """Lets through who wants to connect, at once unless there was trouble lately."""

    def __init__(self, lot: Callable[[], float] = random.random) -> None:
        self._lot = lot
        self._loop = asyncio.get_running_loop()
        self._troubled_until_mono = 0.0
        self._is_away = False
        self._next_mono = 0.0
        self._tries: deque[float] = deque(maxlen=MOST)
        self._waiting: list[tuple[Rank, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_troubled(self) -> bool:
        return self._loop.time() < self._troubled_until_mono

    def trouble(self) -> None:
        """A connection was lost. Whether the server is away, the next to connect finds out for all. Not so if somebody
        has got through since the trouble began: what was opened before is found lost one by one."""
        self._is_away |= not self.is_troubled
        self._troubled_until_mono = self._loop.time() + CALM_AFTER_S

    async def connect(self, connect: Callable[[], Awaitable[T]], rank: Rank) -> T:
        """What `connect` answers; or what it raised for somebody else while we waited."""
        if self.is_troubled:
            await self._wait(rank)
        try:
            conn = await connect()
        except StoreError as error:
            self._failed(error)
            raise
        self._is_away = False
        self._let_in()
        return conn

    def _failed(self, error: StoreError) -> None:
        self.trouble()
        self._is_away = True
        waiting, self._waiting = self._waiting, []
        for _, _, waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)

    async def _wait(self, rank: Rank) -> None:
        waiter = self._loop.create_future()
        heapq.heappush(self._waiting, (rank, next(self._numbers), waiter))
        self._let_in()
        await waiter

    def _let_in(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        while self._waiting:
            if (opens_mono := self._opens()) > now:
                self._timer = self._loop.call_at(opens_mono, self._let_in)
                return
            _, _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():  # whoever waited may have been cancelled
                self._tries.append(now)
                self._next_mono = now + APART_S * (1 + self._lot() / 3)
                waiter.set_result(None)

    def _opens(self) -> float:
        """When the next may go."""
        has_room_mono = self._tries[0] + WINDOW_S if len(self._tries) == MOST else 0.0
        return max(has_room_mono, self._next_mono) if self._is_away else has_room_mono
