"""Schedules, and the fire times that become tasks."""

from __future__ import annotations

import asyncio
from datetime import datetime

import pytest

from taskyard.model.command import Cancel
from taskyard.model.device import QuarantinedAccount
from taskyard.model.each import Each
from taskyard.model.firing import Fire, FireKind
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp, CancelCode, CancelRequest
from taskyard.model.order import Priority
from taskyard.model.recurrence import Cron, Every
from taskyard.model.retry import RetryPolicy
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.schedule_state import ScheduleState, fail, forget, pause
from taskyard.model.state import TaskState
from taskyard.model.task import DedupeScope, TaskRecord
from taskyard.ports.device import DeviceStore
from taskyard.ports.schedules import KEEP_FIRES, Fired, FireRow, FireTasks, ScheduleStatus, ScheduleStore
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, claim, everything, settle, state_of, uuids

NIGHTLY = Schedule(name="nightly", rule=Cron("0 4 * * *", "Europe/Berlin"), consumer="fetch")
BEGUN = ScheduleState.begin(NOON)


def kept(store: Store) -> ScheduleStore:
    assert isinstance(store, ScheduleStore)
    return store


async def put(store: Store, schedule: Schedule = NIGHTLY, state: ScheduleState = BEGUN) -> str:
    """A new schedule; its version."""
    assert await kept(store).put_schedule(schedule, state, version=None, by="ann")
    return (await look(store, schedule.name)).version


async def look(store: Store, name: str = "nightly") -> ScheduleStatus:
    (status,) = await kept(store).schedules(name)
    return status


def a_fire(at: datetime = NOON, kind: FireKind = FireKind.ON_TIME) -> Fire:
    return Fire(fire_at=at, due_at=at, kind=kind)


async def fire(store: Store, *fires: Fire, name: str = "nightly", cancels: bool = False) -> list[TaskRecord]:
    """Fire with the present version; the records that were offered for the fires, in order."""
    status = await look(store, name)
    pairs = [FireTasks(one, [a_record(one.due_at)]) for one in fires]
    fired = await kept(store).fire(name, version=status.version, state=status.state, fires=pairs, cancels=cancels)
    assert fired is not None
    return [record for pair in pairs for record in pair.records]


class ScheduleContract(Desk):
    @pytest.mark.spec("SCH-21")
    async def test_a_schedule_is_kept_as_it_was_put(self, store: Store) -> None:
        """Every field of its definition and of its state comes back, with who has put it there."""
        schedule = Schedule(
            name="all",
            rule=Every(900, anchor=NOON),
            consumer="fetch",
            args='{"a":[1,"\\u00e4"]}',
            queue="cpu",
            priority=Priority.HIGH,
            key="k",
            timeout_s=1.5,
            retry=RetryPolicy(max_retries=7),
            missed=Missed.ALL,
            catch_up_s=60,
            grace_s=5,
            overlap=Overlap.BUFFER,
            jitter_s=3,
            start_at=NOON,
            end_at=NOON + seconds(1e6),
            each=Each(function="list_accounts", timeout_s=5, dedupe_scope=DedupeScope.KEY_IDLE),
            requires={"role": "eu"},
        )
        state = ScheduleState(
            watermark_at=NOON,
            active_since=NOON - seconds(1),
            max_watermark_at=NOON + seconds(1),
            buffered_at=NOON,
            fired=1,
            missed=2,
            skipped=3,
        )
        state = fail(state, now=NOON, problem="no database")
        state = pause(state, now=NOON, note="x")
        assert await kept(store).put_schedule(schedule, state, version=None, by="ann", from_code=True)
        await put(store)
        found, nightly = await kept(store).schedules()
        assert (found.name, found.schedule, found.state) == ("all", schedule, state)
        assert (found.by, found.from_code, found.is_busy, found.problem) == ("ann", True, False, "")
        assert (nightly.schedule, nightly.from_code, nightly.by) == (NIGHTLY, False, "ann")
        assert await kept(store).schedules("none") == []

    @pytest.mark.spec("SCH-21")
    async def test_a_schedule_is_changed_only_as_it_was_seen(self, store: Store) -> None:
        """Who has not seen the last change changes nothing, and neither does who takes a name for new that is not."""
        first = await put(store)
        other = Schedule(name="nightly", rule=Every(60), consumer="fetch")
        assert not await kept(store).put_schedule(other, BEGUN, version=None, by="bob")
        assert await kept(store).put_schedule(other, BEGUN, version=first, by="bob")
        assert not await kept(store).put_schedule(NIGHTLY, BEGUN, version=first, by="ann")
        status = await look(store)
        assert (status.schedule, status.by) == (other, "bob")
        assert status.version != first

    @pytest.mark.spec("SCH-21")
    async def test_a_dropped_schedule_is_gone(self, store: Store) -> None:
        """With all it has fired; its tasks stay, and who saw it before cannot fire it, nor one of the same name."""
        version = await put(store)
        (task,) = await fire(store, a_fire())
        assert await kept(store).drop_schedule("nightly")
        assert not await kept(store).drop_schedule("nightly")
        assert await kept(store).schedules() == []
        assert await kept(store).list_fires("nightly") == []
        await store.turn(A)
        assert await state_of(store, task) is TaskState.QUEUED
        assert await kept(store).fire("nightly", version=version, state=BEGUN) is None
        await put(store)
        assert await kept(store).fire("nightly", version=version, state=BEGUN) is None

    @pytest.mark.spec("SCH-21")
    async def test_fires_become_tasks_in_order(self, store: Store) -> None:
        """Each is added as by a submit, queued behind what is there, in the order given, or waits until it is due."""
        await put(store)
        await add(store, first := a_record())
        late = Fire(fire_at=NOON + seconds(1), due_at=NOON + seconds(5), kind=FireKind.ON_TIME)
        second, third, later = await fire(store, a_fire(NOON - seconds(9)), a_fire(), late)
        assert await state_of(store, later) is TaskState.SCHEDULED
        turned = await store.turn(A)
        assert turned.next_due == NOON + seconds(5)
        assert uuids(await claim(store, 9)) == uuids([first, second, third])

    @pytest.mark.spec("SCH-21")
    async def test_a_task_of_a_schedule_waits_for_its_key(self, store: Store, clock: ManualClock) -> None:
        """Keys hold for tasks that a schedule makes, as for all others."""
        await put(store)
        version = (await look(store)).version
        pairs = [FireTasks(a_fire(NOON - seconds(n)), [a_record(key="k")]) for n in (2, 1)]
        await kept(store).fire("nightly", version=version, state=BEGUN, fires=pairs)
        (held,) = await claim(store, 9)
        await settle(store, held, Move.completed(at=clock.now()))
        assert uuids(await claim(store, 9)) == uuids(pairs[1].records)

    @pytest.mark.spec("SCH-21")
    async def test_a_fire_is_told(self, store: Store) -> None:
        """Who listens hears of the task, at the latest when a turn has been taken."""
        last = (await store.events(after=-1)).last
        await put(store)
        (task,) = await fire(store, a_fire())
        await store.turn(A)
        assert [event.uuid for event in (await store.events(after=last)).events if event.kind == "submitted"] == [
            task.uuid
        ]

    @pytest.mark.spec("SCH-17")
    async def test_of_two_leaders_one_fires(self, store: Store) -> None:
        """Both decide on the same version: one fires, for the other nothing happens, and it is told."""
        version = await put(store)
        state = ScheduleState(watermark_at=NOON, fired=1)
        asked = [
            kept(store).fire("nightly", version=version, state=state, fires=[FireTasks(a_fire(), [a_record()])])
            for _ in range(5)
        ]
        fired = [one for one in await asyncio.gather(*asked) if one is not None]
        assert len(fired) == 1
        assert list(await everything(store)) == fired[0].made
        assert (await look(store)).state == state

    @pytest.mark.spec("SCH-17", "SCH-21")
    async def test_a_fire_time_makes_one_task(self, store: Store) -> None:
        """A second one makes no task whatever its version, and is not counted; what is new beside it does and is."""
        await put(store)
        (task,) = await fire(store, a_fire())
        status = await look(store)
        later = a_fire(NOON + seconds(1))
        again = [FireTasks(a_fire(), [a_record()]), FireTasks(later, [new := a_record()])]
        counted = ScheduleState(watermark_at=NOON, fired=2)
        fired = await kept(store).fire("nightly", version=status.version, state=counted, fires=again)
        assert fired == Fired([new.uuid], [], [FireRow(fire_at=later.fire_at, task=new.uuid, kind=later.kind)])
        assert set(await everything(store)) == {task.uuid, new.uuid}
        assert (await look(store)).state == ScheduleState(watermark_at=NOON, fired=1)

    @pytest.mark.spec("SCH-17", "SCH-21")
    async def test_each_item_of_a_fire_time_makes_one_task(self, store: Store) -> None:
        """All of them in one transaction, in order; a second call for this fire time makes none of them again."""
        version = await put(store)
        records = [a_record(key=f"k{n}") for n in range(3)]
        pairs = [FireTasks(a_fire(), records, skipped=2)]
        fired = await kept(store).fire("nightly", version=version, state=BEGUN, fires=pairs)
        row = FireRow(fire_at=NOON, task=records[0].uuid, kind=FireKind.ON_TIME, made=3, skipped=2)
        assert fired == Fired(uuids(records), [], [row])
        assert await kept(store).list_fires("nightly") == [row]
        version = (await look(store)).version
        counted = ScheduleState(watermark_at=NOON, fired=1)
        again = [FireTasks(a_fire(), [a_record(), a_record()])]
        assert await kept(store).fire("nightly", version=version, state=counted, fires=again) == Fired([])
        assert (await look(store)).state.fired == 0
        assert uuids(await claim(store, 9)) == uuids(records)

    @pytest.mark.spec("SCH-21")
    @pytest.mark.parametrize("scope", [DedupeScope.PENDING, DedupeScope.QUEUED])
    async def test_an_item_is_skipped_while_the_same_work_is_there(
        self, store: Store, clock: ManualClock, scope: DedupeScope
    ) -> None:
        """What is queued counts as skipped, what runs does by its scope, and so does an item that comes twice."""

        def items(*names: str) -> list[TaskRecord]:
            return [a_record(key=name, dedupe_slot=name, dedupe_scope=scope) for name in names]

        async def fire_items(at: datetime, *names: str) -> FireRow:
            pairs = [FireTasks(a_fire(at), items(*names))]
            version = (await look(store)).version
            fired = await kept(store).fire("nightly", version=version, state=BEGUN, fires=pairs)
            assert fired is not None
            (row,) = fired.rows
            assert (row.made, row.skipped, row.task) == (len(fired.made), fired.skipped, (fired.made or [""])[0])
            return row

        await put(store)
        row = await fire_items(NOON - seconds(3), "a", "b", "c", "a")
        assert (row.made, row.skipped) == (3, 1)
        running, ended = await claim(store, 2)
        await settle(store, ended, Move.completed(at=clock.now()))
        row = await fire_items(NOON - seconds(2), "a", "b", "c")
        assert (row.made, row.skipped) == ((1, 2) if scope is DedupeScope.PENDING else (2, 1))
        row = await fire_items(NOON - seconds(1), "a", "b", "c")
        assert (row.made, row.skipped, row.task) == (0, 3, "")
        assert running.record.key == "a"
        assert len(await everything(store)) == (4 if scope is DedupeScope.PENDING else 5)

    @pytest.mark.spec("SCH-21")
    async def test_an_item_of_a_quarantined_account_is_skipped(self, store: Store, clock: ManualClock) -> None:
        """It counts as skipped, and the other items of the fire are made."""
        assert isinstance(store, DeviceStore)
        stamp = AuditStamp("ana", clock.now(), "banned")
        await store.quarantine_account(
            QuarantinedAccount(pool="default", account="b", consumer="fetch", failures=5, quarantined=stamp)
        )
        records = [a_record(key=name, dedupe_slot=name, dedupe_scope=DedupeScope.KEY_IDLE) for name in "abcb"]
        await put(store)
        fires = [FireTasks(a_fire(), records)]
        fired = await kept(store).fire("nightly", version=(await look(store)).version, state=BEGUN, fires=fires)
        assert fired is not None
        assert fired.made == [records[0].uuid, records[2].uuid]
        assert [(row.made, row.skipped, row.task) for row in fired.rows] == [(2, 2, records[0].uuid)]
        assert set(await everything(store)) == set(fired.made)

    @pytest.mark.spec("SCH-21")
    async def test_a_fire_of_items_beside_one_that_has_fired(self, store: Store) -> None:
        """Of two fire times, the one that has fired makes nothing, and the items of the other are all made."""

        def items() -> list[TaskRecord]:
            return [a_record(dedupe_slot=name, dedupe_scope=DedupeScope.QUEUED) for name in "ab"]

        await put(store)
        await fire(store, a_fire())
        await claim(store, 9)
        status = await look(store)
        later = FireTasks(a_fire(NOON + seconds(1)), items())
        pairs = [FireTasks(a_fire(), items()), later, FireTasks(a_fire(NOON + seconds(2)), [])]
        state = ScheduleState(watermark_at=NOON, fired=4)
        fired = await kept(store).fire("nightly", version=status.version, state=state, fires=pairs)
        assert fired is not None
        assert fired.made == uuids(later.records)
        assert [(row.fire_at - NOON, row.made, row.skipped) for row in fired.rows] == [
            (seconds(1), 2, 0),
            (seconds(2), 0, 0),
        ]
        assert (await look(store)).state.fired == 3

    @pytest.mark.spec("SCH-21")
    async def test_a_schedule_is_busy_until_all_of_its_items_have_ended(self, store: Store, clock: ManualClock) -> None:
        """And a fire that cancels what came before cancels each of them."""
        version = await put(store)
        records = [a_record() for _ in range(3)]
        pairs = [FireTasks(a_fire(), records)]
        await kept(store).fire("nightly", version=version, state=BEGUN, fires=pairs)
        for _ in records:
            assert (await look(store)).is_busy
            (held,) = await claim(store)
            await settle(store, held, Move.completed(at=clock.now()))
        status = await look(store)
        assert not status.is_busy
        pairs = [FireTasks(a_fire(NOON + seconds(1)), records := [a_record() for _ in range(3)])]
        await kept(store).fire("nightly", version=status.version, state=BEGUN, fires=pairs)
        status = await look(store)
        pairs = [FireTasks(a_fire(NOON + seconds(2)), [a_record() for _ in range(2)])]
        fired = await kept(store).fire("nightly", version=status.version, state=BEGUN, fires=pairs, cancels=True)
        assert fired is not None
        assert sorted(fired.canceled) == sorted(uuids(records))

    @pytest.mark.spec("SCH-21")
    async def test_two_schedules_fire_at_the_same_time(self, store: Store) -> None:
        """A fire time is taken for one schedule, not for all."""
        await put(store)
        await put(store, Schedule(name="other", rule=Every(60), consumer="fetch"))
        await fire(store, a_fire())
        await fire(store, a_fire(), name="other")
        assert len(await everything(store)) == 2

    @pytest.mark.spec("SCH-21")
    async def test_last_fires_are_listed(self, store: Store) -> None:
        """Newest first, as they became tasks, with the task of each and why there is one."""
        await put(store)
        fires = [a_fire(), a_fire(NOON + seconds(1), FireKind.BY_HAND), a_fire(NOON - seconds(9), FireKind.BACKFILL)]
        tasks = await fire(store, *fires)
        rows = [
            FireRow(fire_at=one.fire_at, task=task.uuid, kind=one.kind) for one, task in zip(fires, tasks, strict=True)
        ]
        assert await kept(store).list_fires("nightly") == rows[::-1]
        assert await kept(store).list_fires("nightly", limit=1) == rows[2:]
        assert await kept(store).list_fires("none") == []

    @pytest.mark.spec("SCH-21")
    async def test_a_schedule_is_busy_while_a_task_of_its_own_has_not_ended(
        self, store: Store, clock: ManualClock
    ) -> None:
        """From the fire on, while the task waits and while it runs; no longer when it has ended, or is pruned."""
        await put(store)
        assert not (await look(store)).is_busy
        await fire(store, a_fire())
        assert (await look(store)).is_busy
        (held,) = await claim(store)
        assert (await look(store)).is_busy
        await settle(store, held, Move.completed(at=clock.now()))
        assert not (await look(store)).is_busy
        await fire(store, a_fire(NOON - seconds(1)))
        assert (await look(store)).is_busy
        (held,) = await claim(store)
        await settle(store, held, Move.completed(at=clock.now()))
        await store.prune(finished_before=clock.now() + seconds(1))
        assert not (await look(store)).is_busy

    @pytest.mark.spec("SCH-21")
    async def test_earlier_tasks_are_canceled_for_the_next(self, store: Store, clock: ManualClock) -> None:
        """Those that wait at once, those that run are asked to stop; the new one, those that have ended and those of
        other schedules are left alone."""
        await put(store)
        await put(store, Schedule(name="other", rule=Every(60), consumer="fetch"))
        await fire(store, a_fire())
        (ended,) = await claim(store)
        await settle(store, ended, Move.completed(at=clock.now()))
        (foreign,) = await fire(store, a_fire(), name="other")
        await claim(store)
        running, waiting = await fire(store, a_fire(NOON - seconds(2)), a_fire(NOON - seconds(1)))
        await claim(store)
        status = await look(store)
        fires = [FireTasks(a_fire(NOON - seconds(3)), [new := a_record()])]
        fired = await kept(store).fire("nightly", version=status.version, state=status.state, fires=fires, cancels=True)
        assert fired is not None
        assert (fired.made, sorted(fired.canceled)) == ([new.uuid], sorted([running.uuid, waiting.uuid]))
        assert (await store.signals(A)).cancels == [running.uuid]
        await store.turn(A)
        records = await everything(store)
        asked = CancelRequest(clock.now(), code=CancelCode.OVERLAP, subject="nightly")
        assert [records[one.uuid].cancel for one in (running, waiting, foreign, new)] == [asked, asked, None, None]
        states = [records[one.uuid].state for one in (ended, foreign, running, waiting, new)]
        assert states == ["completed", "running", "running", "canceled", "queued"]

    @pytest.mark.spec("SCH-21")
    async def test_old_fire_times_are_forgotten(self, store: Store) -> None:
        """Only beyond the number that is kept, and never one whose task has not ended or that is still to come."""
        await put(store)
        (held,) = await fire(store, a_fire(NOON - seconds(3)))
        ahead = a_fire(NOON + seconds(10**6))
        (future,) = await fire(store, ahead)
        status = await look(store)
        ended = [FireTasks(a_fire(NOON + seconds(n)), [a_record(NOON + seconds(9e8))]) for n in range(KEEP_FIRES + 50)]
        await kept(store).fire("nightly", version=status.version, state=BEGUN, fires=ended)
        await store.apply([future.uuid, *(one.records[0].uuid for one in ended)], Cancel())
        status = await look(store)
        state = ScheduleState(watermark_at=NOON + seconds(10**5))
        await kept(store).fire("nightly", version=status.version, state=state)
        rows = await kept(store).list_fires("nightly", limit=10**6)
        assert [row.fire_at for row in rows[-2:]] == [ahead.fire_at, NOON - seconds(3)]
        assert len(rows) == KEEP_FIRES + 2
        assert rows[-1].task == held.uuid
        assert (await look(store)).state == forget(state, NOON + seconds(49))
