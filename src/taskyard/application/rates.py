"""How fast tasks finish, from the events that a store keeps."""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime, timedelta

from taskyard.model.state import ENDED
from taskyard.ports.store import Store

QUEUE_RATE_S = 60.0
"""Seconds over which the rate of a queue is taken."""

RATE_EVENTS = 10_000
"""Events read for a rate: as many as a store keeps. On a busy store they cover less than a minute."""

MAX_RATE_PAGES = 20
"""Pages of a thousand events read for a rate: a store may be written faster than it is read here."""

FINISHED_KINDS = frozenset(str(state) for state in ENDED)


async def read_rates(store: Store, now: datetime) -> dict[str, float]:
    """Tasks of each queue that finished, per second."""
    finished: Counter[str] = Counter()
    cursor, since, first = await recent_cursor(store, RATE_EVENTS), now - timedelta(seconds=QUEUE_RATE_S), now
    for _ in range(MAX_RATE_PAGES):
        page = await store.events(after=cursor)
        if not page.events:
            break
        first, cursor = min(first, page.events[0].at), page.last
        finished.update(event.queue for event in page.events if event.kind in FINISHED_KINDS and event.at >= since)
    # Older events may have been dropped: before the first one that is left, the rate is unknown.
    over_s = min(QUEUE_RATE_S, max(1.0, (now - first).total_seconds()))
    return {queue: count / over_s for queue, count in finished.items()}


async def recent_cursor(store: Store, count: int) -> int:
    """The event number after which there are about `count` events, or all that the store keeps. Some stores number
    events without gaps, others leave a gap of any size after each."""
    newest = (await store.events(after=-1)).last
    reach = count
    while True:
        start = max(0, newest - reach)
        page = await store.events(after=start, limit=count)
        if start == 0 or page.missed or len(page.events) == count:
            break
        reach *= 16
    seen: deque[int] = deque(maxlen=count)
    while page.events:
        seen.extend(event.seq for event in page.events)
        page = await store.events(after=page.last)
    return seen[0] - 1 if seen else newest
