"""What a store reads of a queue for a forecast, and that the forecast comes true."""

from __future__ import annotations

import pytest

from taskyard.model.command import Hold
from taskyard.model.forecast import forecast
from taskyard.model.move import Move
from taskyard.model.queue import Pause, QueueOrder, QueueSettings, QueueState
from taskyard.model.queue_order import RUNS_READ
from taskyard.model.state import TaskState
from taskyard.model.why import Reason
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.forecasting import check_seed
from taskyard.testing.samples import a_record, an_add, an_error, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, claim, start, uuids

SEEDS = 4
"""Seeds of each order. The torture test `orders` runs 200."""


def _bucket(order: QueueOrder, n: int) -> str | None:
    return f"bucket-{n:02}" if order is QueueOrder.BUCKETS else None


class ForecastContract(Desk):
    @pytest.mark.spec("QUE-32")
    @pytest.mark.parametrize("order", QueueOrder)
    @pytest.mark.parametrize("seed", range(SEEDS))
    async def test_tasks_start_as_shown(self, store: Store, clock: ManualClock, order: QueueOrder, seed: int) -> None:
        """The shown order and expected starts are those that happen, with keys, priorities, patience, holds, retries
        and due times; and the first few are the same however few are listed."""
        await check_seed(store, clock, seed, order)

    @pytest.mark.spec("QUE-32")
    async def test_a_median_needs_three_completed_runs(self, store: Store, clock: ManualClock) -> None:
        """The time of a consumer is the median of its completed runs; failed ones do not count, and two are too few."""
        claims = await start(store, *(a_record() for _ in range(4)), *(a_record(consumer="shrink") for _ in range(3)))
        assert await store.median_run_s(["fetch", "shrink"]) == {}
        for n, held in enumerate(claims):
            clock.advance(1.5)
            failed = Move.failed(at=clock.now(), error=an_error())
            move = failed if n in (3, 6) else Move.completed(at=clock.now())
            await store.turn(A, settles=[(held, move)])
        assert await store.median_run_s(["fetch", "shrink", "nobody"]) == {"fetch": 3.0}
        assert await store.median_run_s([]) == {}

    @pytest.mark.spec("QUE-32")
    async def test_an_attempt_before_the_last_does_not_count(self, store: Store, clock: ManualClock) -> None:
        """Of a task that was tried again only the attempt that completed counts."""
        for _ in range(3):
            (held,) = await start(store, a_record(due_at=clock.now()))
            clock.advance(60)
            retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error())
            await store.turn(A, settles=[(held, retry)])
            (again,) = await claim(store)
            clock.advance(2)
            await store.turn(A, settles=[(again, Move.completed(at=clock.now()))])
        assert await store.median_run_s(["fetch"]) == {"fetch": 2.0}

    @pytest.mark.spec("QUE-32")
    async def test_many_runs_of_another_consumer_leave_a_median(self, store: Store, clock: ManualClock) -> None:
        """A consumer that seldom runs keeps its median when another one fills the latest finished tasks."""
        slow = await start(store, *(a_record(consumer="shrink") for _ in range(3)))
        clock.advance(30)
        await store.turn(A, settles=[(held, Move.completed(at=clock.now())) for held in slow])
        for _ in range(RUNS_READ // 1000 + 1):
            claims = await start(store, *(a_record() for _ in range(1000)))
            clock.advance(1)
            await store.turn(A, settles=[(held, Move.completed(at=clock.now())) for held in claims])
        assert await store.median_run_s(["fetch", "shrink", "nobody"]) == {"fetch": 1.0, "shrink": 30.0}

    @pytest.mark.spec("QUE-32")
    @pytest.mark.parametrize("order", QueueOrder)
    async def test_only_the_first_of_a_long_queue_are_read(
        self, store: Store, clock: ManualClock, order: QueueOrder
    ) -> None:
        """However many wait, `limit` of each part are read, without arguments; the counts are exact."""
        await store.set_queue(QueueSettings(name="default", order=order))
        waiting = [a_record(args='{"n": 1}', consumer=c) for _ in range(100) for c in ("fetch", "shrink")]
        keyed = [a_record(key="k") for _ in range(50)]
        later = [a_record(due_at=clock.now() + seconds(9)) for _ in range(20)]
        other = [a_record(queue="cpu") for _ in range(20)]
        await store.turn(A, adds=[an_add(*waiting, *keyed, *later, *other)])
        for record in waiting[-10:]:
            await store.apply([record.uuid], Hold())
        snapshot = await store.queue_snapshot("default", limit=3)
        assert snapshot.counts == {TaskState.QUEUED: 240, TaskState.SCHEDULED: 20, TaskState.PAUSED: 10}
        assert (set(snapshot.consumers), sum(snapshot.consumers.values())) == ({"fetch", "shrink"}, 240)
        assert len(snapshot.records) == len({record.id for record in snapshot.records}) <= 90
        assert {record.queue for record in snapshot.records} == {"default"}
        assert {record.args for record in snapshot.records} == {"{}"}
        assert snapshot.has_keys
        assert not (await store.queue_snapshot("cpu", limit=3)).has_keys
        shown = forecast(snapshot, {}, limit=3)
        assert [entry.uuid for entry in shown.waiting] == uuids(await claim(store, 3))
        assert [entry.place for entry in shown.waiting] == [1, 2, 3]
        assert len(shown.apart) == 3

    @pytest.mark.spec("QUE-32")
    async def test_very_many_keys_share_what_is_read(self, store: Store, clock: ManualClock) -> None:
        """Of three hundred keys with thirty tasks each some thousands are read, and the listed places are right."""
        await store.turn(A, adds=[an_add(*(a_record(key=f"key-{n}") for _ in range(30) for n in range(300)))])
        snapshot = await store.queue_snapshot("default", limit=1000)
        assert len(snapshot.records) <= 4300
        shown = [entry.uuid for entry in forecast(snapshot, {}, limit=1000).waiting]
        assert len(shown) == 1000
        for first in (0, 300, 600):
            claims = await claim(store, 300)
            assert uuids(claims) == shown[first : first + 300]
            await store.turn(A, settles=[(held, Move.completed(at=clock.now())) for held in claims])

    @pytest.mark.spec("QUE-32")
    @pytest.mark.parametrize("order", QueueOrder)
    async def test_very_many_lanes_share_what_is_read(
        self, store: Store, clock: ManualClock, order: QueueOrder
    ) -> None:
        """Of a hundred consumers, or buckets, some thousands of tasks are read. Where more of one would follow, the
        list ends: what it has is right."""
        await store.set_queue(QueueSettings(name="default", order=order))
        first = [a_record(consumer="work-0", bucket=_bucket(order, 0)) for _ in range(200)]
        rest = [a_record(consumer=f"work-{n}", bucket=_bucket(order, n)) for _ in range(60) for n in range(100)]
        await store.turn(A, adds=[an_add(*first, *rest)])
        snapshot = await store.queue_snapshot("default", limit=1000)
        assert len(snapshot.records) <= 4000
        shown = [entry.uuid for entry in forecast(snapshot, {}, limit=1000).waiting]
        assert len(shown) == (40 if order is QueueOrder.PRIORITY else 1000)
        assert shown == uuids(await claim(store, 1000))[: len(shown)]

    @pytest.mark.spec("QUE-32")
    async def test_a_queue_nobody_has_used_is_empty(self, store: Store) -> None:
        """A queue that is not there is shown as one without tasks; one that is paused as such, even if it is empty."""
        empty = forecast(await store.queue_snapshot("nothing", limit=5), {}, limit=5)
        assert (empty.running, empty.waiting, empty.apart, empty.waiting_count) == ([], [], [], 0)
        await store.control("nothing", Pause(), by="ana")
        assert forecast(await store.queue_snapshot("nothing", limit=5), {}, limit=5).state is QueueState.PAUSED

    @pytest.mark.spec("QUE-32")
    async def test_what_does_not_start_by_itself_is_apart(self, store: Store, clock: ManualClock) -> None:
        """Running, waiting and all others are told apart, and the others say what they wait for."""
        (running,) = await start(store, a_record())
        held, later = a_record(), a_record(due_at=clock.now() + seconds(60))
        await add(store, waiting := a_record(), held, later)
        await store.apply([held.uuid], Hold("wrong file"), by="ana")
        view = forecast(await store.queue_snapshot("default", limit=9), {}, limit=9)
        assert uuids(view.running) == [running.uuid]
        assert uuids(view.waiting) == [waiting.uuid]
        assert [(entry.uuid, entry.why and entry.why.reason) for entry in view.apart] == [
            (held.uuid, Reason.HELD),
            (later.uuid, Reason.SCHEDULED),
        ]
