"""Telling other processes that something happened, and hearing of it: hints, with a look once a second behind them.

A commit that notifies waits for every other such commit on the server. So a hint goes with what it tells of only if no
other does so at the time, and else apart from it. It goes out at once, unless there is much to tell: then what follows
soon goes together.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from taskyard.errors import StoreError
from taskyard.model.task import new_uuid
from taskyard.ports.store import News
from taskyard.stores.postgres.connection import Connection, connect
from taskyard.stores.postgres.constants import CHANNEL
from taskyard.stores.postgres.errors import typed_errors
from taskyard.stores.postgres.gate import Gate, Rank
from taskyard.stores.postgres.link import Links

log = logging.getLogger("taskyard")

APART_S, APART_CAP_S = 0.002, 0.02
"""Between two hints of one process, at least and at most: doubled while there is much to tell, else halved. Others look
when they hear one: with more of them they would look for nothing."""

MUCH = 300.0
"""Turns to tell of in a second. Somebody who submits when he has heard of the last result is far from it, and must not
be made to wait each time because he had to wait the last time."""

POLL_S = 1.0
"""How often it is looked whether anybody has written, should a hint have been lost: after a little longer than that."""


class Hints:
    """Whoever watches is called when another process has told something, or may have written."""

    def __init__(self, url: str, gate: Gate, reads: Links) -> None:
        self._url, self._gate, self._reads = url, gate, reads
        self._me = new_uuid()
        self._send = Links(url, gate, most=1, rank=Rank.HINTS, settings={"synchronous_commit": "off"})
        self._heard: Callable[[News], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_told = asyncio.Event()
        self._all_told.set()
        self._unsent: News | None = None
        self._told = 0
        self._offer_from_mono = 0.0
        self._snapshot = ""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def watch(self, heard: Callable[[News], None]) -> None:
        is_first = self._heard is None
        self._heard = heard
        if is_first:
            self._spawn(self._listen)
            self._spawn(self._poll)

    async def close(self) -> None:
        """What is still to tell is told first, unless that takes about as long as others take to look by themselves."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._all_told.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()
            await self._send.close()

    def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- telling ------------------------------------------------------------------------------------------------------

    def tell(self, news: News = News.CHANGED) -> None:
        """Soon; nobody waits for it."""
        self._told += 1
        self._unsent = news if self._unsent is None else max(self._unsent, news)
        if self._all_told.is_set():
            self._all_told.clear()
            self._spawn(self._tell)

    def offer(self, news: News) -> str | None:
        """A hint for a turn to take along; None if there is much to tell."""
        now_mono = asyncio.get_running_loop().time()
        return self._word(news) if self._all_told.is_set() and now_mono >= self._offer_from_mono else None

    def hold_back(self) -> None:
        """A turn has taken one along: the next is not offered at once."""
        self._offer_from_mono = asyncio.get_running_loop().time() + APART_S

    def tell_all(self) -> None:
        """Others, and whoever watches here: somebody else's transaction has ended."""
        if self._heard is not None:
            self._heard(News.CHANGED)
        self.tell()

    def _word(self, news: News) -> str:
        return f"{self._me} {news.name}"

    async def _tell(self) -> None:
        time = asyncio.get_running_loop().time
        apart_s = APART_S
        try:
            while self._unsent is not None:
                news, self._unsent, self._told = self._unsent, None, 0
                began_mono = time()
                try:
                    async with self._send.use() as conn:
                        with typed_errors(self._url):
                            await conn.execute(f"SELECT pg_notify('{CHANNEL}', $1)", self._word(news))
                except StoreError as error:
                    log.debug("others were not told: %s", error)  # they look once a second
                await asyncio.sleep(began_mono + apart_s - time())
                apart_s = pause_after(apart_s, self._told, time() - began_mono)
        finally:
            self._all_told.set()

    # --- hearing ------------------------------------------------------------------------------------------------------

    def _on_hint(self, _conn: object, _pid: int, _channel: str, payload: object) -> None:
        who, _, what = str(payload).partition(" ")
        if who != self._me and self._heard is not None:
            self._heard(News[what] if what in News.__members__ else News.NODES)  # of another version

    async def _listen(self) -> None:
        """Keep listening, over one connection after the other. Each is asked now and then whether it still lives."""
        while True:
            conn: Connection | None = None
            try:
                conn = await self._gate.connect(partial(connect, self._url), Rank.HINTS)
                with typed_errors(self._url):
                    await conn.add_listener(CHANNEL, self._on_hint)
                    while True:
                        await asyncio.sleep(10 * POLL_S)
                        await conn.execute("SELECT 1")
            except StoreError as error:
                self._gate.trouble()
                log.debug("not listening to others: %s", error)
            except Exception as error:  # whatever it is: others are then heard by looking, and soon again by listening
                self._gate.trouble()
                log.error("listening to others went wrong and begins again", exc_info=error)
            finally:
                if conn is not None:
                    conn.terminate()

    async def _poll(self) -> None:
        try:
            async with self._reads.use() as conn:
                with typed_errors(self._url):
                    self.saw(await conn.fetchval("SELECT pg_current_snapshot()::text"))
        except StoreError:
            self._poll_later()  # whoever calls a verb next is told
        except Exception as error:
            log.error("looking whether others have written went wrong", exc_info=error)
            self._poll_later()

    def saw(self, snapshot: str) -> None:
        """Whatever anybody writes, the set of running transactions is another afterwards."""
        if snapshot != self._snapshot and self._heard is not None:
            self._heard(News.CHANGED)
        self._snapshot = snapshot
        self._poll_later()

    def _poll_later(self) -> None:
        """A timer that is put off needs no wake-up of its own: a node asks once a second for the beats of others."""
        if self._timer is not None:
            self._timer.cancel()
        if self._heard is not None and not self._is_closed:
            delay = POLL_S * (1.25 + random.random() / 4)
            self._timer = asyncio.get_running_loop().call_later(delay, self._spawn, self._poll)


def pause_after(pause_s: float, told: int, in_s: float) -> float:
    """How long to keep the next two hints apart, when so much was to tell in the time since the last."""
    if told > max(1.0, MUCH * in_s):
        return min(2 * pause_s, APART_CAP_S)
    return max(pause_s / 2, APART_S)
