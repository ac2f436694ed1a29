"""One reader of a store's events for all subscribers of a yard.

A subscriber that starts in the past reads the store itself until it has come as far as the tail, then it is attached.
An attached subscriber costs the store nothing. One that falls behind is detached, keeps what it was given, and reads
the store again from there: it holds up neither the tail nor the other subscribers, and it misses events only if the
store has forgotten them meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager

from taskyard.errors import EventsMissed, NotOpen, StoreError
from taskyard.listening import AWAY, pause
from taskyard.model.event import Event, EventFilter, EventPage
from taskyard.ports.store import Store

log = logging.getLogger("taskyard")

UNREAD_AT_MOST = 2_000
"""Events that wait for a subscriber when more arrive: beyond that it is detached. Twice what one read brings."""

SLICE = 500
"""Events that are given to all subscribers before other code of the event loop gets a turn."""


class _Subscriber:
    def __init__(self, where: EventFilter, after: int) -> None:
        self.where = where
        self.reached = after
        """The number of the last event that was given to it or passed over."""
        self.is_confirmed = False
        """Whether the store has come to that number. Of a restored store, a subscriber may know a later one."""
        self.error: Exception | None = None
        """Raised when it has read what it was given."""
        self.wake = asyncio.Event()
        self._given: deque[Sequence[Event]] = deque()
        self._unread = 0

    @property
    def is_slow(self) -> bool:
        return self._unread > UNREAD_AT_MOST

    def give(self, events: Sequence[Event]) -> None:
        """Those of these that it has asked for, and has not had."""
        where, reached = self.where, self.reached
        wanted = [event for event in events if event.seq > reached and where.matches(event)]
        self.reached = max(reached, events[-1].seq)
        if wanted:
            self._given.append(wanted)
            self._unread += len(wanted)
            self.wake.set()

    def take(self) -> Sequence[Event]:
        """Events that it was given and has not read; none if there are no more."""
        if not self._given:
            return ()
        events = self._given.popleft()
        self._unread -= len(events)
        return events

    def fail(self, error: Exception) -> None:
        self.error = error
        self.wake.set()


class EventTail:
    """`changes` gives an event that is set whenever something may have happened in the store."""

    def __init__(self, store: Store, changes: Callable[[], AbstractContextManager[asyncio.Event]]) -> None:
        self._store, self._changes = store, changes
        self._attached: set[_Subscriber] = set()
        self._seen = 0
        """How far the tail has read."""
        self._reading: asyncio.Task[None] | None = None
        self._hint: asyncio.Event | None = None
        self._closing = asyncio.Event()
        self._is_away = False

    async def follow(self, *, after: int, where: EventFilter) -> AsyncGenerator[Event, None]:
        """What `where` is about, after event number `after`, until the tail is closed. A store that is away is waited
        for. `EventsMissed` if the store has forgotten some."""
        mine = _Subscriber(where, after)
        try:
            while True:
                while events := mine.take():
                    for event in events:
                        yield event
                if mine.error is not None:
                    raise mine.error
                if self._closing.is_set():
                    return
                if self._attach(mine):
                    await self._next(mine)
                else:
                    await self._catch_up(mine)
        finally:
            self._detach(mine)

    async def close(self) -> None:
        """Read what has happened until now, and end all subscriptions when they have read it."""
        self._closing.set()
        if self._hint is not None:
            self._hint.set()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        for subscriber in self._attached:
            subscriber.wake.set()

    # --- subscribers --------------------------------------------------------------------------------------------------

    def _attach(self, mine: _Subscriber) -> bool:
        """False if it has to catch up first. Nothing else runs between the comparison and its end."""
        if mine in self._attached:
            return True
        if self._reading is None:
            self._seen = mine.reached
            self._reading = asyncio.get_running_loop().create_task(self._run(), name="taskyard-events")
        elif mine.reached < self._seen or (mine.reached > self._seen and not mine.is_confirmed):
            return False
        self._attached.add(mine)
        return True

    def _detach(self, mine: _Subscriber) -> None:
        self._attached.discard(mine)
        if not self._attached and self._hint is not None:
            self._hint.set()  # the tail ends

    async def _next(self, mine: _Subscriber) -> None:
        """Until it is given something, or is no longer attached."""
        await mine.wake.wait()
        mine.wake.clear()

    async def _catch_up(self, mine: _Subscriber) -> None:
        page = await self._read(mine.reached)
        if page is None:
            return
        if page.missed:
            raise EventsMissed(mine.reached, page.last)
        if page.events:
            mine.give(page.events)
        # Past the events that it did not ask for as well.
        mine.reached, mine.is_confirmed = page.last, True

    # --- the tail -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Read on for as long as somebody is attached."""
        try:
            with self._changes() as hint:
                self._hint = hint
                while self._attached:
                    hint.clear()
                    is_last = self._closing.is_set()
                    page = await self._read(self._seen)
                    if page is not None:
                        await self._give_all(page)
                    if is_last:
                        break
                    if page is not None and not page.events:
                        await hint.wait()
        except Exception as error:
            for subscriber in self._attached:
                subscriber.fail(error)
        finally:
            self._reading = self._hint = None
            # Nothing reads for them any more: a subscriber that goes on attaches again.
            for subscriber in self._attached:
                subscriber.wake.set()
            self._attached.clear()

    async def _give_all(self, page: EventPage) -> None:
        if page.missed:
            for subscriber in self._attached:
                subscriber.fail(EventsMissed(subscriber.reached, page.last))
            self._attached.clear()
        for start in range(0, len(page.events), SLICE):
            if start:
                await asyncio.sleep(0)
            events = page.events[start : start + SLICE]
            for subscriber in list(self._attached):
                if subscriber.is_slow:
                    self._attached.discard(subscriber)
                    subscriber.wake.set()
                else:
                    subscriber.give(events)
            self._seen = events[-1].seq
        self._seen = page.last
        for subscriber in self._attached:
            subscriber.reached = max(subscriber.reached, page.last)

    async def _read(self, after: int) -> EventPage | None:
        """The next page; None when the tail is closed meanwhile, or the store has to be asked again."""
        try:
            page = await self._store.events(after=after)
        except AWAY as error:
            if not self._is_away:
                log.warning("events are read on when the store answers: %s", error)
            self._is_away = True
            await pause(self._closing)
            return None
        except (NotOpen, StoreError):
            if self._closing.is_set():
                return None
            raise
        self._is_away = False
        return page
