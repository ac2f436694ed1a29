"""A queue of a store, run from one seed: the order that was shown against the order in which the tasks started."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import count
from random import Random

from taskyard.model.command import Hold, Release
from taskyard.model.forecast import forecast
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.node import Node
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.queue_order import QueueOrderView
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, seconds

TASKS = 24
KEYS = (None, None, "a", "b", "c")
BUCKETS = ("red", "green", "blue")
_numbers = count()


class SeededQueue:
    """One queue with its own consumers and node, all drawn from `seed`. A run of a consumer always takes as long."""

    def __init__(self, store: Store, clock: ManualClock, seed: int, order: QueueOrder) -> None:
        self._store, self._clock, self._rng = store, clock, Random(seed)
        rng, number = self._rng, next(_numbers)
        self.settings = QueueSettings(
            name=f"queue-{number}",
            order=order,
            concurrency=rng.choice((None, 1, 1, 2, 3, 5)),
            per_key=rng.choice((1, 1, 2)),
            starve_after=rng.choice((None, 2, 3, 8)),
            starve_wait_s=rng.choice((None, 20.0, 90.0)),
        )
        names = [f"work-{number}-{n}" for n in range(rng.randint(1, 3))]
        self.run_s = dict(zip(names, rng.sample(range(2, 40), len(names)), strict=True))
        limits = {name: rng.randint(1, 4) for name in names}
        self.node = Node(
            incarnation=f"forecast-{number}", name="forecast", pid=1, host="host", consumers=tuple(names),
            limits=limits, max_running=rng.randint(1, 6),
        )  # fmt: skip
        self.running: list[tuple[datetime, Claim]] = []
        self.started: list[tuple[str, datetime]] = []
        self.last_end_at = clock.now()

    async def prepare(self) -> None:
        """Let each consumer have a past, and the queue tasks of which some have started, failed or are held."""
        await self._store.join(self.node)
        await self._store.set_queue(self.settings)
        await self._make_history()
        for _ in range(3):
            await self._store.turn(self.node.incarnation, adds=[an_add(*map(self._make_task, range(TASKS // 3)))])
            for _ in range(self._rng.randint(0, 3)):
                await self.step(failing=True)
        waiting = await self._list(TaskState.QUEUED)
        for record in self._rng.sample(waiting, min(len(waiting), self._rng.randint(0, 4))):
            await self._store.apply([record.uuid], Hold())

    def _make_task(self, n: int) -> TaskRecord:
        rng, now = self._rng, self._clock.now()
        due_at = now + seconds(rng.randint(5, 120)) if rng.random() < 0.15 else now - seconds(rng.randint(0, 60))
        return a_record(
            now - seconds(60),
            due_at=due_at,
            consumer=rng.choice(list(self.run_s)),
            queue=self.settings.name,
            priority=rng.choice((0, 1, 1, 2)),
            key=rng.choice(KEYS),
            bucket=rng.choice(BUCKETS) if self.settings.order is QueueOrder.BUCKETS else None,
        )

    async def _make_history(self) -> None:
        records = [
            a_record(self._clock.now(), consumer=name, queue=f"{self.settings.name}-past")
            for name in self.run_s
            for _ in range(3)
        ]
        node = self.node.incarnation
        claims = await self._store.turn(node, adds=[an_add(*records)], demand=Demand(99, dict.fromkeys(self.run_s, 99)))
        took_s = 0
        for run_s, name in sorted((run_s, name) for name, run_s in self.run_s.items()):
            self._clock.advance(run_s - took_s)
            took_s, now = run_s, self._clock.now()
            ended = [(one, Move.completed(at=now)) for one in claims.claims if one.record.consumer == name]
            await self._store.turn(node, settles=ended)

    # --- what really happens ------------------------------------------------------------------------------------------

    def _demand(self) -> Demand | None:
        room = dict(self.node.limits)
        for _, held in self.running:
            room[held.record.consumer] -= 1
        total = (self.node.max_running or 0) - len(self.running)
        free = {name: n for name, n in room.items() if n > 0}
        return Demand(total, free) if total > 0 and free else None

    async def step(self, *, failing: bool = False) -> bool:
        """Start what may start; then on to the next end or due time. False if there is none."""
        await self._turn([])
        due = [record.due_at for record in await self._list(TaskState.SCHEDULED, TaskState.RETRYING)]
        nexts = [*(ends_at for ends_at, _ in self.running), *due]
        if not nexts:
            return False
        now = max(min(nexts), self._clock.now())
        self._clock.advance((now - self._clock.now()).total_seconds())
        ended = [held for ends_at, held in self.running if ends_at <= now]
        self.running = [(ends_at, held) for ends_at, held in self.running if ends_at > now]
        await self._turn([(held, self._end(now, failing=failing)) for held in ended])
        return True

    def _end(self, now: datetime, *, failing: bool) -> Move:
        self.last_end_at = now
        if failing and self._rng.random() < 0.3:
            return Move.retrying(at=now, due_at=now + seconds(self._rng.randint(1, 60)), error=an_error())
        return Move.completed(at=now)

    async def _turn(self, settles: list[tuple[Claim, Move]]) -> None:
        running = self.running
        turned = await self._store.turn(self.node.incarnation, settles=settles, demand=self._demand())
        now = self._clock.now()
        for held in turned.claims:
            running.append((now + seconds(self.run_s[held.record.consumer]), held))
            self.started.append((held.uuid, now))

    async def _list(self, *states: TaskState) -> list[TaskRecord]:
        return await self._store.list_tasks(TaskFilter(queue=self.settings.name, states=states), limit=1000)

    # --- what is shown ------------------------------------------------------------------------------------------------

    async def look(self, limit: int = 1000, concurrency: int | None = None) -> QueueOrderView:
        snapshot = await self._store.queue_snapshot(self.settings.name, limit=limit)
        medians = await self._store.median_run_s(sorted(self.run_s))
        return forecast(snapshot, medians, limit=limit, concurrency=concurrency)

    async def check(self) -> int:
        """Compare what is shown with what happens until nothing starts any more; how many started."""
        await self._turn([])  # what may start at once has started
        shown, first = await self.look(), await self.look(limit=3)
        assert [entry.uuid for entry in first.waiting] == [entry.uuid for entry in shown.waiting][:3]
        assert len(shown.waiting) == shown.waiting_count
        self.started.clear()
        while await self.step():
            pass
        listed = {entry.uuid for entry in shown.waiting}
        expected = [(entry.uuid, entry.expected_start_at) for entry in shown.waiting if entry.expected_start_at]
        happened = [(uuid, at) for uuid, at in self.started if uuid in listed]
        assert expected == happened, _differ(expected, happened)
        return len(happened)

    async def release_all(self) -> None:
        for record in await self._list(TaskState.PAUSED):
            await self._store.apply([record.uuid], Release())

    async def finish(self) -> None:
        left = await self._list(*(state for state in TaskState if state is not TaskState.COMPLETED))
        assert left == [], f"{len(left)} tasks have not been completed"
        await self._store.leave(self.node.incarnation)


def _differ(expected: Sequence[object], happened: Sequence[object]) -> str:
    both = zip([*expected, None], [*happened, None], strict=False)
    at = next((n for n, (one, other) in enumerate(both) if one != other), 0)
    return f"from place {at + 1} on: shown {expected[at : at + 3]}, happened {happened[at : at + 3]}"


async def check_seed(store: Store, clock: ManualClock, seed: int, order: QueueOrder) -> int:
    """Run one queue from a seed: the shown order and the expected starts are those that happen, before and after what
    was held is released. How many tasks were compared."""
    queue = SeededQueue(store, clock, seed, order)
    await queue.prepare()
    compared = await queue.check()
    await queue.release_all()
    compared += await queue.check()
    await queue.finish()
    return compared
