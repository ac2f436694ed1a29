"""What people say about whole queues."""

from __future__ import annotations

import pytest

from taskyard.model.event import EventKind
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp
from taskyard.model.order import Priority
from taskyard.model.queue import (
    Pause,
    QueueCommand,
    QueueControl,
    QueueSettings,
    QueueState,
    QueueStatus,
    Resume,
    SetConcurrency,
    StopAfterCurrent,
)
from taskyard.model.state import TaskState
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, settle, start, tick, uuids

K = EventKind


async def say(store: Store, command: QueueCommand, *, queue: str = "default", by: str = "ann") -> QueueControl:
    return (await store.control(queue, command, by=by)).control


async def look(store: Store, queue: str = "default") -> QueueStatus:
    (status,) = [status for status in await store.queues() if status.name == queue]
    return status


class ControlContract(Desk):
    async def told(self, store: Store, after: int) -> list[tuple[str, str, str, str]]:
        """What was told of queues after that event."""
        events = (await store.events(after=after)).events
        return [
            (event.kind, event.queue, event.uuid, event.consumer) for event in events if event.kind.startswith("qu")
        ]

    @pytest.mark.spec("QUE-09")
    async def test_a_paused_queue_starts_nothing(self, store: Store, clock: ManualClock) -> None:
        """What runs goes on and may end, nothing new starts, not even what is added just now; others are not held."""
        (running,) = await start(store, a_record())
        await add(store, waiting := a_record())
        said = await say(store, Pause("backup"))
        assert said == QueueControl(state=QueueState.PAUSED, state_set=AuditStamp("ann", clock.now(), "backup"))
        turned = await store.turn(A, adds=[an_add(a_record(), other := a_record(queue="cpu"))], demand=room(9))
        assert uuids(turned.claims) == [other.uuid]
        turned = await store.turn(A, settles=[(running, Move.completed(at=clock.now()))], demand=room(9))
        assert (turned.settled, turned.claims) == ([None], [])
        assert await claim(store, 9, node=B) == []
        await say(store, Resume())
        assert uuids(await claim(store, 1, node=B)) == [waiting.uuid]

    @pytest.mark.spec("QUE-09")
    async def test_a_queue_is_paused_before_its_first_task(self, store: Store) -> None:
        """A word about a queue that nobody has used holds from its first task on."""
        await say(store, Pause(), queue="new")
        turned = await store.turn(A, adds=[an_add(task := a_record(queue="new"))], demand=room(9))
        assert turned.claims == []
        await say(store, Resume(), queue="new")
        assert uuids(await claim(store, 9)) == [task.uuid]

    @pytest.mark.spec("QUE-09")
    async def test_rules_leave_what_people_said_alone(self, store: Store) -> None:
        """A process that starts and sets its rules neither resumes a queue nor lifts a limit."""
        await store.set_queue(QueueSettings(name="default", concurrency=5))
        await say(store, SetConcurrency(1, "hot"))
        await say(store, Pause("backup"))
        await store.set_queue(QueueSettings(name="default", concurrency=7, per_key=2))
        status = await look(store)
        assert (status.control.state, status.control.concurrency, status.settings.concurrency) == ("paused", 1, 7)
        await add(store, *(a_record() for _ in range(3)))
        assert await claim(store, 9) == []
        await say(store, Resume())
        assert len(await claim(store, 9)) == 1

    @pytest.mark.spec("QUE-09")
    async def test_the_first_word_is_kept_unless_the_reason_is_another(self, store: Store, clock: ManualClock) -> None:
        """Pausing what is paused for the same reason changes nothing; another reason is another word."""
        first = await say(store, Pause("backup"))
        clock.advance(1)
        assert await say(store, Pause("backup"), by="bob") == first
        second = await say(store, Pause("fire"), by="bob")
        assert second.state_set == AuditStamp("bob", clock.now(), "fire")

    @pytest.mark.spec("QUE-10")
    async def test_stop_after_current_is_stopping_until_the_last_has_ended(
        self, store: Store, clock: ManualClock
    ) -> None:
        """It says stopping while anything of the queue runs, and paused from the transaction in which the last ends."""
        one, two = await start(store, a_record(), a_record())
        await add(store, a_record())
        said = await say(store, StopAfterCurrent("deploy"))
        assert (said.state, said.state_set) == (QueueState.STOPPING, AuditStamp("ann", clock.now(), "deploy"))
        turned = await store.turn(A, settles=[(one, Move.completed(at=clock.now()))], demand=room(9))
        assert (turned.claims, (await look(store)).control) == ([], said)
        last = (await store.events(after=-1)).last
        clock.advance(1)
        retry = Move.retrying(at=clock.now(), due_at=clock.now() + seconds(9), error=an_error())
        turned = await store.turn(A, settles=[(two, retry)], demand=room(9))
        assert turned.claims == []
        now = (await look(store)).control
        assert (now.state, now.state_set) == (QueueState.PAUSED, said.state_set)
        assert await self.told(store, last) == [(K.QUEUE_PAUSED, "default", "", "")]

    @pytest.mark.spec("QUE-10")
    async def test_a_stop_is_over_when_a_dead_nodes_tasks_are_taken_back(self, store: Store) -> None:
        """A rescue ends runs as a settle does: with the last of them the queue is paused."""
        await start(store, a_record())
        await say(store, StopAfterCurrent())
        await store.rescue(A)
        assert (await look(store)).control.state is QueueState.PAUSED
        assert await claim(store, 9, node=B) == []

    @pytest.mark.spec("QUE-10")
    async def test_a_stop_can_be_taken_back(self, store: Store, clock: ManualClock) -> None:
        """Resumed while it is stopping, a queue starts tasks again and is not paused later."""
        (running,) = await start(store, a_record())
        await add(store, waiting := a_record())
        await say(store, StopAfterCurrent())
        assert (await say(store, Resume())).state is QueueState.RUNNING
        turned = await store.turn(A, settles=[(running, Move.completed(at=clock.now()))], demand=room(9))
        assert uuids(turned.claims) == [waiting.uuid]
        assert (await look(store)).control.state is QueueState.RUNNING

    @pytest.mark.spec("QUE-10")
    async def test_an_idle_queue_is_stopped_at_once(self, store: Store) -> None:
        """With nothing of the queue running, it is paused; what runs elsewhere does not count."""
        await start(store, a_record(queue="cpu"))
        assert (await say(store, StopAfterCurrent())).state is QueueState.PAUSED

    @pytest.mark.spec("QUE-10")
    async def test_a_paused_queue_is_stopping_while_something_runs(self, store: Store, clock: ManualClock) -> None:
        """A stop of a queue that is paused already shows what still runs of it; with nothing running, the same word
        said again changes nothing, and who said it first is remembered."""
        (running,) = await start(store, a_record())
        await say(store, Pause())
        said = await say(store, StopAfterCurrent("deploy"))
        assert (said.state, said.state_set) == (QueueState.STOPPING, AuditStamp("ann", clock.now(), "deploy"))
        await settle(store, running, Move.completed(at=clock.now()))
        last = (await store.events(after=-1)).last
        again = await say(store, StopAfterCurrent("deploy"), by="bob")
        assert (again.state, again.state_set) == (QueueState.PAUSED, said.state_set)
        assert (await look(store)).control == again
        assert await self.told(store, last) == []

    async def test_a_concurrency_is_changed_and_given_back(self, store: Store, clock: ManualClock) -> None:
        """What a person says holds in the place of the rule, more or less, from the next turn, until it is lifted."""
        await store.set_queue(QueueSettings(name="default", concurrency=2))
        await add(store, *(a_record() for _ in range(9)))
        said = await say(store, SetConcurrency(1, "hot"))
        assert (said.concurrency, said.concurrency_set, said.state_set) == (
            1,
            AuditStamp("ann", clock.now(), "hot"),
            None,
        )
        running = await claim(store, 9)
        assert len(running) == 1
        await say(store, SetConcurrency(4))
        running += await claim(store, 9)
        assert len(running) == 4
        await say(store, SetConcurrency(None), by="bob")
        assert await claim(store, 9) == []
        for held in running[:3]:
            await settle(store, held, Move.completed(at=clock.now()))
        assert len(await claim(store, 9)) == 1

    async def test_what_is_said_of_queues_is_told(self, store: Store) -> None:
        """Every word that changes something leaves one event of its queue, and of no task; others leave none."""
        last = (await store.events(after=-1)).last
        await start(store, a_record())
        for command in (Pause(), Pause(), Resume(), Resume(), StopAfterCurrent(), SetConcurrency(3), SetConcurrency(3)):
            await say(store, command)
        assert await self.told(store, last) == [
            (kind, "default", "", "") for kind in (K.QUEUE_PAUSED, K.QUEUE_RESUMED, K.QUEUE_STOPPING, K.QUEUE_CHANGED)
        ]

    async def test_queues_are_listed_with_what_they_hold(self, store: Store, clock: ManualClock) -> None:
        """Every queue with rules, tasks or a word about it, by name; counted, and with how long its first ones wait."""
        await store.set_queue(rules := QueueSettings(name="ruled", concurrency=3, starve_after=None))
        said = await say(store, Pause("x"), queue="said")
        await add(store, a_record(at=clock.now() - seconds(5), priority=Priority.LOW))
        at = tick(clock, 1)
        await add(store, a_record(at=at), a_record(at=at, key="k"), a_record(at=at + seconds(9)))
        (held,) = await claim(store)
        assert await store.queues() == [
            QueueStatus(
                name="default",
                settings=QueueSettings(name="default"),
                control=QueueControl(),
                counts={TaskState.QUEUED: 2, TaskState.RUNNING: 1, TaskState.SCHEDULED: 1},
                oldest_due_at=at - seconds(6),
            ),
            QueueStatus(name="ruled", settings=rules, control=QueueControl(), counts={}),
            QueueStatus(name="said", settings=QueueSettings(name="said"), control=said, counts={}),
        ]
        answered = await store.control("default", Pause(), by="bob")
        assert answered == await look(store)
        await settle(store, held, Move.completed(at=clock.now()))
        assert (await look(store)).counts[TaskState.COMPLETED] == 1

    async def test_what_waits_for_a_key_is_not_the_oldest_that_could_start(
        self, store: Store, clock: ManualClock
    ) -> None:
        """The age of a queue is that of what could start; of a lane, that of its first by place."""
        await add(store, a_record(at=clock.now(), key="k"), a_record(at=clock.now() - seconds(9), key="k"))
        assert (await look(store)).oldest_due_at == clock.now()
        await claim(store)
        assert (await look(store)).oldest_due_at is None
