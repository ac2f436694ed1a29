"""Who goes first in a queue: by priority with patience, in turn, or in buckets."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.errors import CommandRefused
from taskyard.model.command import Cancel, Hold, MoveBefore, Release, Reschedule, Retry, SetPriority
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, uuids

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


async def order(store: Store, order: QueueOrder, **rules: Any) -> None:
    await store.set_queue(QueueSettings(name="default", order=order, **rules))


def letters(claims: list[Claim], **named: list[TaskRecord]) -> str:
    """`hhl`: which of the named lists each claim is of."""
    names = {record.uuid: name for name, records in named.items() for record in records}
    return "".join(names[held.uuid] for held in claims)


class OrderContract(Desk):
    async def finish(self, store: Store, held: Claim, clock: ManualClock) -> list[Claim]:
        """Complete it, and claim whatever may start then, in one turn."""
        turned = await store.turn(A, settles=[(held, Move.completed(at=clock.now()))], demand=room(9))
        assert turned.settled == [None]
        return turned.claims

    # --- what waits for its time --------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-17", "QUE-30")
    @pytest.mark.parametrize("kind", [QueueOrder.FIFO, QueueOrder.BUCKETS])
    async def test_held_before_its_time_it_holds_up_nobody(
        self, store: Store, clock: ManualClock, kind: QueueOrder
    ) -> None:
        """A task that waited for its time when it was held has no place in line; released when its time has come, it
        gets one behind all others."""
        await order(store, kind)
        await add(store, first := a_record(due_at=clock.now() + seconds(5)), second := a_record(), third := a_record())
        (held,) = await store.apply([first.uuid], Hold())
        assert held.record is not None
        assert not held.record.stands_in_line
        (moved,) = await store.apply([third.uuid], MoveBefore(first.uuid))
        assert isinstance(moved.refused, CommandRefused)
        assert uuids(await claim(store, 1)) == [second.uuid]
        clock.advance(9)
        await store.apply([first.uuid], Release())
        assert uuids(await claim(store, 9)) == [third.uuid, first.uuid]

    @pytest.mark.spec("QUE-30")
    async def test_held_in_line_and_put_off_it_holds_up_nobody(self, store: Store, clock: ManualClock) -> None:
        """A held task that is given a time to come leaves the line; whatever becomes of the queue's order meanwhile."""
        await order(store, QueueOrder.FIFO)
        await add(store, first := a_record(key="k"), second := a_record())
        await store.apply([first.uuid], Hold())
        assert await claim(store, 9) == []
        await store.apply([first.uuid], Reschedule(clock.now() + seconds(5)))
        await order(store, QueueOrder.BUCKETS)
        await order(store, QueueOrder.FIFO)
        assert uuids(await claim(store, 9)) == [second.uuid]
        (released,) = await store.apply([first.uuid], Release())
        assert released.record is not None
        assert released.record.state is TaskState.SCHEDULED
        clock.advance(9)
        assert uuids(await claim(store, 9)) == [first.uuid]

    @pytest.mark.spec("QUE-30")
    async def test_held_in_backoff_it_comes_back_to_its_place(self, store: Store, clock: ManualClock) -> None:
        """A task that is held between two attempts holds up nobody in a strict queue, and has its old place again when
        it is released."""
        await order(store, QueueOrder.FIFO)
        await add(store, *(tasks := [a_record() for _ in range(3)]))
        (held,) = await claim(store, 1)
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error())
        await settle(store, held, retry)
        await store.apply([held.uuid], Hold())
        assert uuids(await claim(store, 1)) == [tasks[1].uuid]
        clock.advance(2)
        await store.apply([held.uuid], Release())
        assert uuids(await claim(store, 9)) == [tasks[0].uuid, tasks[2].uuid]

    # --- priority -----------------------------------------------------------------------------------------------------

    @pytest.mark.spec("QUE-08")
    @pytest.mark.parametrize("at_once", [1, 3, 99])
    async def test_a_lower_priority_is_let_in_after_so_many_higher(self, store: Store, at_once: int) -> None:
        """After K starts of higher ones one lower starts, whether the claims are made one by one or all at once."""
        await order(store, QueueOrder.PRIORITY, starve_after=3, starve_wait_s=None)
        h, n, lo = ([a_record(priority=p) for _ in range(9)] for p in (HIGH, NORMAL, LOW))
        await add(store, *lo, *n, *h)
        claims = []
        while found := await claim(store, at_once):
            claims += found
        assert letters(claims, h=h, n=n, l=lo) == "hhhnlhhhnlhhhl" + "nnnl" * 2 + "n" + "llll"

    @pytest.mark.spec("QUE-08", "QUE-05")
    @pytest.mark.parametrize("at_once", [1, 23, 999])
    async def test_long_lanes_are_taken_in_their_order(self, store: Store, at_once: int) -> None:
        """However much of each source a store reads at once, the order is that of one claim after the other: by place
        within a priority, and past a source from when it has no more room."""
        await order(store, QueueOrder.PRIORITY, starve_after=3, starve_wait_s=None)
        h, n, lo = (
            [a_record(priority=p, consumer=source) for source in ("fetch", "shrink") for _ in range(40)]
            for p in (HIGH, NORMAL, LOW)
        )
        await add(store, *lo, *n, *h)
        left, claims = {"fetch": 30, "shrink": 50}, list[Claim]()
        while found := await claim(store, room(min(at_once, sum(left.values())), **left)):
            claims += found
            for held in found:
                left[held.record.consumer] -= 1
        assert letters(claims, h=h, n=n, l=lo) == "hhhnl" * 16
        for level, of_fetch, of_shrink in ((h, 18, 30), (n, 6, 10), (lo, 6, 10)):
            expected = level[:of_fetch] + level[40 : 40 + of_shrink]
            assert [uuid for uuid in uuids(claims) if uuid in uuids(level)] == uuids(expected)

    @pytest.mark.spec("QUE-08")
    async def test_all_nodes_count_together(self, store: Store) -> None:
        """The starts of two nodes are counted as one."""
        await order(store, QueueOrder.PRIORITY, starve_after=4, starve_wait_s=None)
        h, lo = ([a_record(priority=p) for _ in range(9)] for p in (HIGH, LOW))
        await add(store, *lo, *h)
        claims = [held for n in range(6) for held in await claim(store, 1, node=A if n % 2 else B)]
        assert letters(claims, h=h, l=lo) == "hhhhlh"

    async def test_patience_is_within_a_queue(self, store: Store, clock: ManualClock) -> None:
        """Of several queues the one with the higher priority at its head goes first, however long others have waited; a
        limit of its own makes room for them."""
        await store.set_queue(QueueSettings(name="cpu", order=QueueOrder.FIFO))
        h, n, f = [a_record(priority=HIGH) for _ in range(30)], [a_record(queue="io")], [a_record(queue="cpu")]
        await add(store, *n, *f, *h)
        clock.advance(86_400)
        claims = [held for _ in range(25) for held in await claim(store, 1)]
        assert letters(claims, h=h, n=n, f=f) == "h" * 25
        await order(store, QueueOrder.PRIORITY, concurrency=25)
        assert letters(await claim(store, 2), h=h, n=n, f=f) == "nf"

    @pytest.mark.spec("QUE-08")
    async def test_patience_may_be_endless(self, store: Store, clock: ManualClock) -> None:
        """With both rules off, a lower priority waits for as long as there are higher ones."""
        await order(store, QueueOrder.PRIORITY, starve_after=None, starve_wait_s=None)
        await add(store, low := a_record(priority=LOW), *(a_record(priority=HIGH) for _ in range(30)))
        clock.advance(86_400)
        claims = await claim(store, 99)
        assert uuids(claims)[-1] == low.uuid
        assert len(claims) == 31

    @pytest.mark.spec("QUE-08")
    async def test_patience_survives_a_clock_that_is_set_back(self, store: Store, clock: ManualClock) -> None:
        """A lower priority that was let in at a time that is yet to come, since the clock was set back, is let in."""
        await order(store, QueueOrder.PRIORITY, starve_after=None, starve_wait_s=60)
        due_at = clock.now() - seconds(9000)
        h, lo = ([a_record(priority=p, due_at=due_at) for _ in range(9)] for p in (HIGH, LOW))
        await add(store, *lo, *h)
        assert letters(await claim(store, 2), h=h, l=lo) == "lh"
        clock.step(-3600)
        assert letters(await claim(store, 2), h=h, l=lo) == "lh"

    @pytest.mark.spec("QUE-08")
    async def test_one_is_let_in_when_it_has_waited_too_long(self, store: Store, clock: ManualClock) -> None:
        """One that has waited for T goes before higher ones, one every T: its backlog does not turn the order round."""
        await order(store, QueueOrder.PRIORITY, starve_after=None, starve_wait_s=60)
        h, n, lo = ([a_record(priority=p) for _ in range(9)] for p in (HIGH, NORMAL, LOW))
        await add(store, *lo)
        clock.advance(1)
        await add(store, *(a_record(at=clock.now(), uuid=r.uuid, priority=r.priority) for r in (*n, *h)))
        assert letters(await claim(store, 1), h=h, n=n, l=lo) == "h"
        clock.advance(59)
        assert letters(await claim(store, 2), h=h, n=n, l=lo) == "lh"
        clock.advance(1)
        assert letters(await claim(store, 3), h=h, n=n, l=lo) == "nhh"
        clock.advance(58)
        assert letters(await claim(store, 1), h=h, n=n, l=lo) == "h"
        clock.advance(1)
        assert letters(await claim(store, 2), h=h, n=n, l=lo) == "lh"

    @pytest.mark.spec("QUE-08")
    async def test_by_default_every_ninth_start_and_ten_minutes(self, store: Store, clock: ManualClock) -> None:
        """A queue without rules lets one in after 8 higher ones, and one that has waited for 10 minutes."""
        h, lo = ([a_record(priority=p) for _ in range(20)] for p in (HIGH, LOW))
        await add(store, *lo, *h)
        assert letters(await claim(store, 11), h=h, l=lo) == "hhhhhhhhlhh"
        clock.advance(600)
        assert letters(await claim(store, 3), h=h, l=lo) == "lhh"

    @pytest.mark.spec("QUE-08")
    async def test_only_what_could_start_is_passed(self, store: Store) -> None:
        """Starts count only while the lower one could have started: not while its source has no room."""
        await order(store, QueueOrder.PRIORITY, starve_after=2, starve_wait_s=None)
        h = [a_record(priority=HIGH, consumer="fetch") for _ in range(9)]
        lo = [a_record(priority=LOW, consumer="shrink") for _ in range(2)]
        await add(store, *lo, *h)
        assert letters(await claim(store, room(4, fetch=4, shrink=0)), h=h, l=lo) == "hhhh"
        assert letters(await claim(store, room(4, fetch=4, shrink=4)), h=h, l=lo) == "hhlh"

    @pytest.mark.spec("QUE-08")
    async def test_who_starts_alone_has_had_its_turn(self, store: Store) -> None:
        """A lower one that starts while the higher have no room has been passed over no more: it waits anew."""
        await order(store, QueueOrder.PRIORITY, starve_after=2, starve_wait_s=None)
        h = [a_record(priority=HIGH, consumer="fetch") for _ in range(9)]
        lo = [a_record(priority=LOW, consumer="shrink") for _ in range(9)]
        await add(store, *lo, *h)
        assert letters(await claim(store, room(2, fetch=2, shrink=2)), h=h, l=lo) == "hh"
        assert letters(await claim(store, room(1, fetch=0, shrink=1)), h=h, l=lo) == "l"
        assert letters(await claim(store, room(3, fetch=3, shrink=3)), h=h, l=lo) == "hhl"

    @pytest.mark.spec("QUE-05")
    async def test_a_queue_is_served_by_its_first_task_whatever_it_gives(self, store: Store) -> None:
        """Between queues it counts what stands first in each, also where a lower one is let in."""
        await order(store, QueueOrder.PRIORITY, starve_after=1, starve_wait_s=None)
        h, lo = ([a_record(priority=p) for _ in range(3)] for p in (HIGH, LOW))
        o = [a_record(queue="other") for _ in range(3)]
        await add(store, *lo, *o, *h)
        assert letters(await claim(store, 9), h=h, l=lo, o=o) == "hlhlhooo" + "l"

    # --- strict -------------------------------------------------------------------------------------------------------

    @pytest.mark.spec("DEV-03", "DEV-17")
    async def test_a_strict_queue_goes_by_place_alone(self, store: Store) -> None:
        """Tasks start in the order they came, whatever their priorities and sources; the priority is kept."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record(priority=p, consumer=s) for p, s in ((LOW, "a"), (HIGH, "b"), (NORMAL, "a"), (HIGH, "a"))]
        await add(store, *tasks)
        claims = await claim(store, 2) + await claim(store, 9)
        assert uuids(claims) == uuids(tasks)
        assert [held.record.priority for held in claims] == [LOW, HIGH, NORMAL, HIGH]

    @pytest.mark.spec("DEV-03")
    async def test_the_head_is_never_skipped(self, store: Store) -> None:
        """A head whose source has no room on this node holds up all behind it, and another node may take it."""
        await order(store, QueueOrder.FIFO)
        head, *rest = tasks = [a_record(consumer=s) for s in ("shrink", "fetch", "fetch")]
        await add(store, *tasks)
        assert await claim(store, room(9, fetch=9)) == []
        assert uuids(await claim(store, room(1, shrink=1), node=B)) == [head.uuid]
        assert uuids(await claim(store, room(9, fetch=9))) == uuids(rest)

    @pytest.mark.spec("DEV-03")
    async def test_room_that_is_used_up_stops_a_strict_queue(self, store: Store) -> None:
        """Within one turn as well: when the next one's source is full, nobody behind it starts."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record(consumer=s) for s in ("fetch", "shrink", "fetch", "shrink")]
        await add(store, *tasks)
        assert uuids(await claim(store, room(9, fetch=1, shrink=9))) == uuids(tasks[:2])

    @pytest.mark.spec("DEV-03", "QUE-30")
    async def test_a_head_with_a_busy_key_holds_the_line(self, store: Store, clock: ManualClock) -> None:
        """The account of the head is busy: all wait until it is free, whatever the priorities of those with the key."""
        await order(store, QueueOrder.FIFO)
        first, second = a_record(key="k", priority=LOW), a_record(key="k", priority=LOW)
        third, fourth = a_record(), a_record(key="k", priority=HIGH)
        await add(store, first, second, third, fourth)
        (held,) = await claim(store, 9)
        assert held.uuid == first.uuid
        assert await claim(store, 9, node=B) == []
        (held, free) = await self.finish(store, held, clock)
        assert uuids([held, free]) == uuids([second, third])
        assert uuids(await self.finish(store, held, clock)) == [fourth.uuid]

    @pytest.mark.spec("DEV-03")
    async def test_a_person_may_cancel_the_head(self, store: Store, clock: ManualClock) -> None:
        """When the head that holds up the line is canceled, the next goes on."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record(key="k"), a_record(key="k"), a_record()]
        await add(store, *tasks)
        await claim(store, 9)
        await store.apply([tasks[1].uuid], Cancel())
        assert uuids(await claim(store, 9)) == [tasks[2].uuid]

    async def test_what_waits_for_a_time_is_not_in_line(self, store: Store, clock: ManualClock) -> None:
        """Scheduled and retrying tasks hold up nobody; one that is tried again comes back to its old place."""
        await order(store, QueueOrder.FIFO, concurrency=1)
        first, second, third = a_record(), a_record(), a_record()
        await add(store, a_record(due_at=clock.now() + seconds(60)), first, second, third)
        (held,) = await claim(store, 9)
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(1), error=an_error())
        turned = await store.turn(A, settles=[(held, retry)], demand=room(9))
        assert uuids(turned.claims) == [second.uuid]
        clock.advance(1)
        assert uuids(await self.finish(store, turned.claims[0], clock)) == [first.uuid]

    async def test_a_priority_changes_nothing_in_a_strict_queue(self, store: Store) -> None:
        """A changed priority is kept, and has no effect on the order."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record() for _ in range(3)]
        await add(store, *tasks)
        await store.apply([tasks[2].uuid], SetPriority(HIGH))
        claims = await claim(store, 9)
        assert uuids(claims) == uuids(tasks)
        assert claims[2].record.priority == HIGH

    async def test_rescued_and_retried_tasks_go_to_the_head(self, store: Store, clock: ManualClock) -> None:
        """In a strict queue as in any other, what comes back from a dead node or by hand is at the head again."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record() for _ in range(3)]
        await add(store, *tasks)
        first, second = await claim(store, 2)
        await settle(store, second, Move.failed(at=clock.now(), error=an_error()))
        await store.rescue(A)
        await store.apply([second.uuid], Retry(to_head=True))
        assert uuids(await claim(store, 9, node=B)) == uuids([second, first, tasks[2]])

    async def test_what_is_added_to_an_idle_strict_queue_starts_at_once(self, store: Store) -> None:
        """In the order given, whatever the priorities, in the transaction that stores it."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record(priority=p) for p in (LOW, HIGH, NORMAL)]
        turned = await store.turn(A, adds=[an_add(*tasks)], demand=room(9))
        assert uuids(turned.claims) == uuids(tasks)
        assert await get(store, tasks[0]) == turned.claims[0].record

    async def test_the_order_of_a_queue_can_be_changed(self, store: Store) -> None:
        """From the next turn on, for all that waits there: to strict and back."""
        tasks = [a_record(priority=p, key=k) for p in (LOW, HIGH, NORMAL) for k in (None, "k", "m")]
        await add(store, *tasks)
        await order(store, QueueOrder.FIFO)
        first = await claim(store, 1)
        assert uuids(first) == [tasks[0].uuid]
        await order(store, QueueOrder.PRIORITY)
        second = await claim(store, 1)
        assert uuids(second) == [tasks[3].uuid]
        await order(store, QueueOrder.BUCKETS)
        await order(store, QueueOrder.FIFO)
        assert uuids(await claim(store, 99)) == uuids([tasks[1], tasks[2]])

    async def test_a_strict_queue_stands_beside_others(self, store: Store) -> None:
        """It bids with its head as one of normal priority; held up, it does not hold up other queues."""
        await order(store, QueueOrder.FIFO)
        tasks = [a_record(priority=HIGH), a_record(key="k"), a_record(key="k"), a_record()]
        others = [a_record(queue="other", priority=p) for p in (LOW, HIGH, NORMAL)]
        await add(store, others[0], *tasks, *others[1:])
        assert uuids(await claim(store, 99)) == uuids([others[1], tasks[0], tasks[1], others[2], others[0]])

    # --- buckets ------------------------------------------------------------------------------------------------------

    @pytest.mark.spec("DEV-15")
    @pytest.mark.parametrize("at_once", [1, 2, 99])
    async def test_buckets_take_turns(self, store: Store, at_once: int) -> None:
        """One of each bucket after the other by name, each in the order of arrival, however many at once."""
        await order(store, QueueOrder.BUCKETS)
        a, b, c = ([a_record(bucket=name, priority=p) for p in (LOW, HIGH)] for name in ("a", "b", None))
        await add(store, *a, *b, a_record(bucket="a", uuid="third"), *c)
        claims = []
        while found := await claim(store, at_once):
            claims += found
        assert uuids(claims) == [c[0].uuid, a[0].uuid, b[0].uuid, c[1].uuid, a[1].uuid, b[1].uuid, "third"]
        assert (await get(store, a[0])).bucket == "a"

    @pytest.mark.spec("DEV-15")
    async def test_a_bucket_that_cannot_start_is_passed_over(self, store: Store, clock: ManualClock) -> None:
        """A head that cannot start holds up its own bucket only."""
        await order(store, QueueOrder.BUCKETS)
        a = [a_record(bucket="a", key="k"), a_record(bucket="a", key="k"), a_record(bucket="a")]
        b = [a_record(bucket="b", consumer="shrink"), a_record(bucket="b")]
        c = [a_record(bucket="c") for _ in range(2)]
        await add(store, *a, *b, *c)
        held, *rest = await claim(store, room(9, fetch=9))
        assert uuids([held, *rest]) == uuids([a[0], c[0], c[1]])
        assert uuids(await claim(store, room(9, fetch=9, shrink=1))) == uuids(b)
        assert uuids(await self.finish(store, held, clock)) == uuids([a[1], a[2]])

    @pytest.mark.spec("DEV-15")
    async def test_the_turn_of_the_buckets_is_remembered(self, store: Store) -> None:
        """The next turn goes on after the bucket served last, on whatever node, also when that is empty by then."""
        await order(store, QueueOrder.BUCKETS)
        tasks = {name: [a_record(bucket=name) for _ in range(2)] for name in "abc"}
        await add(store, *tasks["a"], tasks["b"][0], *tasks["c"])
        first, second = await claim(store, 2)
        assert [first.record.bucket, second.record.bucket] == ["a", "b"]
        assert [held.record.bucket for held in await claim(store, 9, node=B)] == ["c", "a", "c"]

    async def test_a_bucket_is_of_no_effect_elsewhere(self, store: Store) -> None:
        """In other queues it is only kept, through run, end and retry."""
        tasks = [a_record(bucket=name) for name in "bab"]
        await add(store, *tasks)
        held, *rest = await claim(store, 9)
        assert uuids([held, *rest]) == uuids(tasks)
        assert held.record == await get(store, tasks[0])
        await settle(store, held, Move.failed(at=NOON, error=an_error()))
        await store.apply([held.uuid], Retry())
        assert (await get(store, held)).bucket == "b"

    async def test_a_failed_task_is_sent_again_into_the_order_of_now(self, store: Store) -> None:
        """What ended before its queue got another order stands in line by that when it is sent again."""
        await add(store, task := a_record(bucket="z"))
        (held,) = await claim(store)
        await settle(store, held, Move.failed(at=NOON, error=an_error()))
        await order(store, QueueOrder.BUCKETS)
        await add(store, other := a_record(bucket="a"))
        await store.apply([task.uuid], Retry())
        assert uuids(await claim(store, 9)) == uuids([other, task])
        assert (await get(store, task)).state is TaskState.RUNNING

    # --- many tasks ---------------------------------------------------------------------------------------------------

    @pytest.mark.spec("DEV-15")
    async def test_of_a_long_bucket_all_is_started(self, store: Store) -> None:
        """However much of newer buckets has been started, the rest of an old one is, with work in other queues too."""
        await order(store, QueueOrder.BUCKETS)
        await add(store, *[a_record(bucket="long") for _ in range(700)])
        await add(store, *[a_record(bucket="short") for _ in range(600)], a_record(queue="other"))
        claimed = 0
        while claims := await claim(store, 100):
            claimed += len(claims)
        assert claimed == 1301

    @pytest.mark.spec("QUE-07")
    async def test_whoever_makes_room_for_a_moved_task_is_started(self, store: Store) -> None:
        """So many are moved before one that the others there have to move up, after some of them have been started."""
        await add(store, *(tasks := [a_record() for _ in range(1000)]), a_record(queue="other"))
        movers = uuids(tasks[700:960])
        await store.apply(movers[:205], MoveBefore(tasks[690].uuid))
        claimed = len(await claim(store, 890))
        await store.apply(movers[205:], MoveBefore(tasks[690].uuid))
        while claims := await claim(store, 100):
            claimed += len(claims)
        assert claimed == 1001
