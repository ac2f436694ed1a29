"""Tasks that an admission check keeps from starting, lanes of tasks that require the same, and previews of a claim."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from taskyard.errors import CommandRefused
from taskyard.model.blocker import BlockerKind, encode_requirements, lane_of
from taskyard.model.command import (
    Block,
    Cancel,
    Hold,
    MoveBefore,
    Release,
    Reschedule,
    SetPriority,
    Skip,
    StartNow,
    Unblock,
)
from taskyard.model.event import EventKind
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason
from taskyard.ports.store import Add, BlockedGroup, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node, a_record, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, start, state_of, tick, uuids
from taskyard.testing.store_contract.scenes import why

BLOCKED, QUEUED = TaskState.BLOCKED, TaskState.QUEUED
DISK = Block("disk", "/data")
FREED = Unblock("disk", "/data")
NODE_C = a_node("c")
STRICT = pytest.mark.parametrize("order", [QueueOrder.FIFO, QueueOrder.BUCKETS])

EU = encode_requirements({"role": "eu"})
US = encode_requirements({"role": "us"})
ANY_LANE, EU_LANE, US_LANE = "fetch", lane_of("fetch", EU), lane_of("fetch", US)


async def block(store: Store, *tasks: TaskRecord, how: Block = DISK) -> None:
    assert [one.refused for one in await store.apply(uuids(tasks), how)] == [None] * len(tasks)


async def unblock(store: Store, *tasks: TaskRecord, how: Unblock = FREED) -> list[Any]:
    return [one.refused for one in await store.apply(uuids(tasks), how)]


class BlockerContract(Desk):
    async def test_a_blocked_task_does_not_start(self, store: Store, clock: ManualClock) -> None:
        """A blocked task keeps its blocker, uses no attempt and tells no start, while others go on."""
        await add(store, blocked := a_record(), other := a_record())
        tick(clock, 5)
        assert [one.refused for one in await store.apply([blocked.uuid], DISK, by="node-1")] == [None]
        assert uuids(await claim(store, 9)) == [other.uuid]
        found = await get(store, blocked)
        assert found.blocker is not None
        assert (found.blocker.kind, found.blocker.detail, found.blocker.since) == ("disk", "/data", clock.now())
        assert (found.state, found.attempt, found.started_at, found.node) == (BLOCKED, 0, None, None)
        assert await store.list_attempts(blocked.uuid) == []
        assert (await store.count())["default", BLOCKED] == 1
        await store.apply([blocked.uuid], FREED, by="node-2")
        told = [(e.kind, e.code, e.actor) for e in (await store.events(after=0)).events if e.uuid == blocked.uuid]
        blocking, freeing = (EventKind.BLOCKED, "disk", "node-1"), (EventKind.QUEUED, "", "node-2")
        assert told == [(EventKind.SUBMITTED, "", ""), blocking, freeing]

    async def test_a_freed_task_stands_where_it_stood(self, store: Store) -> None:
        """A task that is freed has no blocker, and starts before those that were added after it."""
        await add(store, blocked := a_record(), later := a_record())
        await block(store, blocked)
        assert await unblock(store, blocked) == [None]
        assert ((await get(store, blocked)).blocker, await state_of(store, blocked)) == (None, QUEUED)
        assert uuids(await claim(store, 9)) == [blocked.uuid, later.uuid]

    async def test_only_its_own_blocker_frees_a_task(self, store: Store) -> None:
        """Another blocker, or the lack of one, frees nothing; what does not wait in line is not blocked."""
        await add(store, parent := a_record())
        await store.turn(A, adds=[Add([child := a_record()], after={child.uuid: [parent.uuid]})])
        await add(store, blocked := a_record())
        await block(store, blocked)
        for task, how in ((blocked, Unblock("disk", "/")), (child, FREED), (parent, FREED), (child, DISK)):
            (one,) = await store.apply([task.uuid], how)
            assert isinstance(one.refused, CommandRefused)
        assert [await state_of(store, task) for task in (parent, child, blocked)] == [QUEUED, BLOCKED, BLOCKED]
        waiting = (await get(store, child)).blocker
        assert waiting is not None
        assert (waiting.kind, waiting.detail) == (BlockerKind.DEPENDENCY, "1")

    @pytest.mark.spec("QUE-30")
    @STRICT
    async def test_in_a_strict_queue_it_holds_the_line(self, store: Store, order: QueueOrder) -> None:
        """Where the order is strict, nobody passes a blocked task; freed, it is the first to start."""
        await store.set_queue(QueueSettings(name="cpu", order=order))
        head, behind = (a_record(queue="cpu", bucket="b") for _ in range(2))
        await add(store, head, behind)
        await block(store, head)
        assert await claim(store, 9) == []
        assert (await why(store, behind)).reason is Reason.HEAD_OF_LINE
        await unblock(store, head)
        assert uuids(await claim(store, 9)) == [head.uuid, behind.uuid]

    @STRICT
    async def test_a_queue_that_becomes_strict_has_it_in_its_line(self, store: Store, order: QueueOrder) -> None:
        """A task that was blocked before its queue became strict holds the line from then on."""
        head, behind = (a_record(queue="cpu", bucket="b") for _ in range(2))
        await add(store, head, behind)
        await block(store, head)
        await store.set_queue(QueueSettings(name="cpu", order=order))
        assert await claim(store, 9) == []
        await store.apply([head.uuid], Cancel())
        assert uuids(await claim(store, 9)) == [behind.uuid]

    async def test_a_blocked_task_does_not_hold_its_key(self, store: Store, clock: ManualClock) -> None:
        """The next task with the key passes a blocked one; freed while the key is busy, that waits for the key."""
        await add(store, blocked := a_record(key="k"), other := a_record(key="k"))
        await block(store, blocked)
        (held,) = await claim(store, 9)
        assert held.uuid == other.uuid
        await unblock(store, blocked)
        assert await claim(store, 9) == []
        await settle(store, held, Move.completed(at=clock.now()))
        assert uuids(await claim(store, 9)) == [blocked.uuid]

    async def test_people_still_steer_a_blocked_task(self, store: Store, clock: ManualClock) -> None:
        """A blocked task can be canceled, skipped, held, moved, and given another priority or time."""
        tasks = [a_record() for _ in range(6)]
        await add(store, *tasks)
        await block(store, *tasks)
        later = clock.now() + seconds(60)
        commands = (Cancel(), Skip(), Hold(), MoveBefore(tasks[4].uuid), SetPriority(Priority.HIGH), Reschedule(later))
        for task, command in zip(tasks, commands, strict=True):
            (one,) = await store.apply([task.uuid], command)  # type: ignore[arg-type]
            assert one.refused is None, (command, one.refused)
        states = [await state_of(store, task) for task in tasks]
        assert states == [TaskState.CANCELED, TaskState.SKIPPED, TaskState.PAUSED, BLOCKED, BLOCKED, BLOCKED]
        # Released, a task is queued: whether it may start is checked again.
        await store.apply([tasks[2].uuid], Release())
        assert await state_of(store, tasks[2]) is QUEUED
        assert await unblock(store, *tasks[3:]) == [None] * 3
        states = [await state_of(store, task) for task in tasks[3:]]
        assert states == [QUEUED, QUEUED, TaskState.SCHEDULED]
        assert await store.list_blockers() == []

    async def test_a_freed_task_that_was_tried_before_waits_for_its_time(
        self, store: Store, clock: ManualClock
    ) -> None:
        """A task that failed once, was blocked and then put off is scheduled when it is freed."""
        (held,) = await start(store, a_record())
        await settle(store, held, Move.retrying(at=clock.now(), due_at=tick(clock, 1), error=an_error()))
        await store.turn(A)
        await store.apply([held.uuid], DISK)
        await store.apply([held.uuid], Reschedule(clock.now() + seconds(60)))
        assert (await store.apply([held.uuid], FREED))[0].refused is None
        assert await state_of(store, held) is TaskState.SCHEDULED
        tick(clock, 60)
        assert uuids(await claim(store)) == [held.uuid]

    async def test_a_blocked_task_is_started_by_hand(self, store: Store, clock: ManualClock) -> None:
        """It goes to the head of its priority without its blocker, and before the others with its key."""
        tasks = [a_record(), a_record(key="k"), a_record(), a_record(key="k")]
        await add(store, *tasks)
        await block(store, *tasks[2:])
        for task in tasks[2:]:
            (one,) = await store.apply([task.uuid], StartNow())
            assert one.refused is None
            found = await get(store, task)
            assert (found.state, found.blocker, found.blocked_at) == (QUEUED, None, None)
        assert await store.list_blockers() == []
        started = await claim(store, 9)
        assert uuids(started) == [tasks[3].uuid, tasks[2].uuid, tasks[0].uuid]
        await settle(store, started[0], Move.completed(at=clock.now()))
        assert uuids(await claim(store, 9)) == [tasks[1].uuid]

    async def test_blocked_tasks_are_found_by_their_blocker(self, store: Store) -> None:
        """A filter names a kind, or a kind and a detail; blockers are listed with how many wait, and the oldest."""
        tasks = [*(a_record() for _ in range(3)), a_record(consumer="shrink")]
        await add(store, *tasks)
        await block(store, *tasks[:2])
        await block(store, tasks[2], how=Block("disk", "/data:2"))
        await block(store, tasks[3], how=Block("file_lock", "a.mp4"))

        async def found(blocker: str) -> list[str]:
            return uuids(await store.list_tasks(TaskFilter(blocker=blocker)))

        assert await found("disk") == [tasks[2].uuid, tasks[1].uuid, tasks[0].uuid]
        assert await found("disk:/data") == [tasks[1].uuid, tasks[0].uuid]
        assert await found("disk:/data:2") == [tasks[2].uuid]
        assert [await found(none) for none in ("dis", "disk:/", "dependency")] == [[], [], []]
        newest = await store.list_ids(TaskFilter(blocker="disk:/data"), limit=1)
        assert [uuid for _, uuid in newest] == [tasks[1].uuid]
        before = await store.list_ids(TaskFilter(blocker="disk:/data"), before_id=newest[0][0])
        assert [uuid for _, uuid in before] == [tasks[0].uuid]
        assert await store.list_blockers() == [
            BlockedGroup("disk:/data", "fetch", 2, tasks[0].uuid),
            BlockedGroup("disk:/data:2", "fetch", 1, tasks[2].uuid),
            BlockedGroup("file_lock:a.mp4", "shrink", 1, tasks[3].uuid),
        ]

    async def test_why_names_the_blocker(self, store: Store, clock: ManualClock) -> None:
        """A blocked task says what it waits for and since when; so does one of its lane that was not checked, as long
        as a node lives that has the check."""
        await store.join(msgspec.structs.replace(NODE_C, checks=("disk",)))
        await add(store, blocked := a_record(), behind := a_record(), other := a_record(consumer="shrink"))
        tick(clock, 5)
        await block(store, blocked)
        for task, text in ((blocked, "it waits for disk /data"), (behind, "wait for disk /data")):
            found = await why(store, task)
            assert (found.reason, found.since) == (Reason.BLOCKED, clock.now())
            assert text in found.text
        assert (await why(store, other)).reason is Reason.TURN
        await store.leave(NODE_C.incarnation)
        assert "no running worker of 'fetch' has a check for disk" in (await why(store, blocked)).text
        assert (await why(store, behind)).reason is Reason.TURN


class LaneContract(Desk):
    async def test_a_task_is_claimed_by_a_demand_for_its_lane(self, store: Store) -> None:
        """Tasks of one consumer that require different things are counted apart."""
        tasks = [a_record(), a_record(requires=EU), a_record(requires=US), a_record(requires=EU)]
        await add(store, *tasks)
        assert await store.list_lanes() == sorted([ANY_LANE, EU_LANE, US_LANE])
        assert await claim(store, Demand(9, {"shrink": 9})) == []
        assert uuids(await claim(store, Demand(9, {EU_LANE: 1, US_LANE: 1}))) == [tasks[1].uuid, tasks[2].uuid]
        (held,) = await claim(store, Demand(9, {ANY_LANE: 1, EU_LANE: 0}, 9))
        assert (held.uuid, held.record.requires, held.record.lane) == (tasks[0].uuid, None, ANY_LANE)
        (held,) = await claim(store, Demand(9, {ANY_LANE: 1}, 9))
        assert (held.uuid, held.record.requires, held.record.lane) == (tasks[3].uuid, EU, EU_LANE)
        assert (await get(store, tasks[3])).requirements == {"role": "eu"}

    async def test_lanes_of_one_queue_keep_its_order(self, store: Store) -> None:
        """By priority, then by place, whatever the lanes."""
        tasks = [
            a_record(requires=[None, EU, US][n % 3], priority=[Priority.HIGH, Priority.NORMAL][n // 6].value)
            for n in range(12)
        ]
        random.Random(7).shuffle(tasks)
        await add(store, *tasks)
        wanted = sorted(tasks, key=lambda task: task.priority)
        assert uuids(await claim(store, Demand(12, {ANY_LANE: 9, EU_LANE: 9, US_LANE: 9}))) == uuids(wanted)

    @pytest.mark.spec("DEV-03")
    async def test_a_head_whose_lane_is_not_asked_for_holds_the_line(self, store: Store) -> None:
        """A strict queue never skips its head, also if only what stands behind it fits a free place."""
        await store.set_queue(QueueSettings(name="cpu", order=QueueOrder.FIFO))
        await add(store, head := a_record(queue="cpu", requires=EU), behind := a_record(queue="cpu", requires=US))
        assert await claim(store, Demand(9, {ANY_LANE: 9, US_LANE: 9})) == []
        assert uuids(await claim(store, Demand(9, {EU_LANE: 9, US_LANE: 9}))) == [head.uuid, behind.uuid]

    @pytest.mark.spec("DEV-15")
    async def test_another_bucket_passes_such_a_head(self, store: Store) -> None:
        """A bucket whose head fits no free place is passed over; the others go on."""
        await store.set_queue(QueueSettings(name="cpu", order=QueueOrder.BUCKETS))
        await add(store, *[a_record(queue="cpu", bucket="eu", requires=EU) for _ in range(2)])
        await add(store, passes := a_record(queue="cpu", bucket="us", requires=US))
        assert uuids(await claim(store, Demand(9, {US_LANE: 9}))) == [passes.uuid]
        assert await claim(store, Demand(9, {US_LANE: 9})) == []

    async def test_a_task_stays_in_its_lane(self, store: Store, clock: ManualClock) -> None:
        """Due later, tried again, given back, taken back from a dead node, sent again: it requires the same."""
        fits, does_not = Demand(9, {EU_LANE: 9}), Demand(9, {ANY_LANE: 9, US_LANE: 9})
        await store.turn(A, adds=[Add([a_record(due_at=clock.now() + seconds(1), requires=EU)])])

        async def claim_again() -> Any:
            clock.advance(1)
            assert await claim(store, does_not) == []
            (held,) = await claim(store, fits)
            assert held.record.requires == EU
            return held

        held = await claim_again()
        later = clock.now() + seconds(1)
        await settle(store, held, Move.retrying(at=clock.now(), due_at=later, error=an_error()))
        held = await claim_again()
        await settle(store, held, Move.given_back(at=clock.now()))
        await claim_again()
        await store.rescue(A)
        await store.join(a_node("a"))
        held = await claim_again()
        await settle(store, held, Move.completed(at=clock.now()))
        assert (await get(store, held)).requires == EU

    async def test_a_start_in_the_turn_that_adds_it_looks_at_the_lane(self, store: Store) -> None:
        """On an idle store a submit starts at once only if its lane is asked for."""
        turned = await store.turn(A, adds=[Add([task := a_record(requires=EU)])], demand=Demand(9, {ANY_LANE: 9}))
        assert turned.claims == []
        turned = await store.turn(A, adds=[Add([other := a_record(requires=US)])], demand=Demand(9, {US_LANE: 9}))
        assert uuids(turned.claims) == [other.uuid]
        assert await state_of(store, task) is QUEUED

    # --- previews and claims of what was previewed --------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(4))
    async def test_a_preview_is_what_a_claim_then_does(self, store: Store, clock: ManualClock, seed: int) -> None:
        """A preview names what would be claimed, in that order, over queues of every order, and changes nothing."""
        rng = random.Random(seed)
        orders = {"cpu": QueueOrder.FIFO, "gpu": QueueOrder.BUCKETS, "default": QueueOrder.PRIORITY}
        for name, order in orders.items():
            await store.set_queue(
                QueueSettings(name=name, order=order, starve_after=2, concurrency=rng.choice([None, 7]))
            )
        for _ in range(3):
            await add(
                store,
                *(
                    a_record(
                        queue=rng.choice(list(orders)),
                        consumer=rng.choice(["fetch", "shrink"]),
                        requires=rng.choice([None, EU]),
                        priority=rng.randrange(3),
                        bucket=rng.choice("xyz"),
                        key=rng.choice([None, None, "k", "l"]),
                    )
                    for _ in range(15)
                ),
            )
        for _ in range(6):
            demand = Demand(rng.randint(1, 5), {"fetch": rng.randint(0, 3), "shrink": 2, EU_LANE: rng.randint(0, 3)})
            last = (await store.events(after=-1)).last
            previewed = await store.preview(demand)
            assert await store.preview(demand) == previewed
            assert (await store.events(after=-1)).last == last
            assert {record.state for record in previewed} <= {QUEUED}
            only = Demand(demand.total, demand.per_lane, only={record.id: None for record in previewed})
            claimed = await claim(store, rng.choice([demand, only]))
            assert uuids(claimed) == uuids(previewed)
            tick(clock, 400)

    async def test_a_claim_may_name_its_tasks(self, store: Store) -> None:
        """Only the tasks that are named start; one before them that is not named ends the claim."""
        await add(store, first := a_record(), second := a_record(), third := a_record())
        ids = [(await get(store, task)).id for task in (first, second, third)]
        every = {ANY_LANE: 9}
        assert await claim(store, Demand(9, every, only={})) == []
        assert await claim(store, Demand(9, every, only={ids[1]: None})) == []
        assert uuids(await claim(store, Demand(9, every, only={ids[0]: None, ids[2]: None}))) == [first.uuid]
        await add(store, ahead := a_record(priority=Priority.HIGH.value))
        assert await claim(store, Demand(9, every, only={ids[1]: None, ids[2]: None})) == []
        assert uuids(await claim(store, 9)) == [ahead.uuid, second.uuid, third.uuid]

    @pytest.mark.parametrize("how", [TaskState.COMPLETED, TaskState.FAILED, TaskState.INTERRUPTED])
    async def test_an_attempt_knows_its_place(self, store: Store, clock: ManualClock, how: TaskState) -> None:
        """The place that a claim names is that of the attempt, from the claim on, and of no later one."""
        await add(store, task := a_record(), a_record())
        ids = [record.id for record in await store.preview(room(9))]
        held, bare = await claim(store, Demand(9, {ANY_LANE: 9}, only={ids[0]: "emu-1", ids[1]: None}))
        assert (held.record.device, bare.record.device) == ("emu-1", None)
        assert (await get(store, task)).device == "emu-1"
        assert [run.device for run in await store.list_attempts(task.uuid)] == ["emu-1"]
        if how is TaskState.INTERRUPTED:
            await store.rescue(A)
            await store.join(a_node("a"))
        else:
            failed = Move.failed(at=clock.now(), error=an_error())
            await settle(store, held, Move.completed(at=clock.now()) if how is TaskState.COMPLETED else failed)
        (run,) = await store.list_attempts(task.uuid)
        assert (run.state, run.device, (await get(store, task)).device) == (how, "emu-1", None)

    async def test_why_says_that_no_place_fits(self, store: Store) -> None:
        """A task whose labels no node offers is told so; one that fits a place that is taken, that it is."""
        phones = {"fetch": [{"role": "eu"}, {"role": "us"}]}
        await store.join(msgspec.structs.replace(NODE_C, places=phones))
        await store.leave(A)
        await store.leave(B)
        await add(store, fits := a_record(requires=EU), lost := a_record(requires=encode_requirements({"role": "jp"})))
        assert (await why(store, lost)).reason is Reason.NO_PLACE
        assert "role=jp" in (await why(store, lost)).text
        assert (await why(store, fits)).reason is Reason.PLACES_BUSY


__all__ = ["BlockerContract", "LaneContract", "start"]
