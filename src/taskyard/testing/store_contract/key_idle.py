"""The scope `key_idle`: a new task is a duplicate while the same work is pending, and while its key runs."""

from __future__ import annotations

import pytest

from taskyard.errors import AccountQuarantined, DuplicateTask, SlotTaken
from taskyard.model.command import Cancel, Hold, Release, Retry, Skip
from taskyard.model.device import QuarantinedAccount
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp, Note, NoteCode
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, Dedupe, DedupeScope, TaskRecord
from taskyard.ports.device import DeviceStore
from taskyard.ports.store import Add, Added, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, an_error, room, seconds
from taskyard.testing.store_contract.desk import A, Desk, add, claim, everything, settle, start, state_of, try_add

KEY = "seven"


def a_task(slot: str = "daily", key: str | None = KEY, queue: str = "default") -> TaskRecord:
    """A task of the account `key` with the scope; its slot is the account and the type of the work."""
    return a_record(key=key, queue=queue, dedupe_slot=f"{slot} {key}", dedupe_scope=DedupeScope.KEY_IDLE)


async def refusal(store: Store, record: TaskRecord, dedupe: Dedupe = Dedupe.REFUSE) -> DuplicateTask | None:
    """Why it is refused; None, and it is stored, if it is not."""
    answer = await try_add(store, record, dedupe=dedupe)
    if isinstance(answer, DuplicateTask):
        return answer
    assert answer == [Added(record.uuid)]
    return None


async def holder(store: Store, record: TaskRecord, dedupe: Dedupe = Dedupe.REFUSE) -> str | None:
    """The task that keeps it out; None, and it is stored, if none does."""
    refused = await refusal(store, record, dedupe)
    return None if refused is None else refused.existing


class KeyIdleContract(Desk):
    async def run(self, store: Store, record: TaskRecord) -> Claim:
        """Add it with this scope, and claim it."""
        await add(store, record, dedupe=Dedupe.REFUSE)
        (held,) = await claim(store)
        assert held.uuid == record.uuid
        return held

    @pytest.mark.spec("QUE-19")
    async def test_while_a_key_runs_no_task_of_it_is_accepted(self, store: Store, clock: ManualClock) -> None:
        """Whatever the running task is, of another consumer and without any dedupe, a new task of its key is refused
        until it has ended; the refusal names it, its key and its state."""
        (running,) = await start(store, a_record(key=KEY, consumer="shrink"))
        refused = await refusal(store, a_task())
        assert refused is not None
        assert (refused.existing, refused.key, refused.state) == (running.uuid, KEY, "running")
        assert f"task {running.uuid} runs with the same key, 'seven'" in str(refused)
        await settle(store, running, Move.completed(at=clock.now()))
        assert await holder(store, a_task()) is None

    @pytest.mark.spec("QUE-19")
    @pytest.mark.parametrize("is_tied", [False, True])
    async def test_a_task_is_merged_into_the_one_that_runs_with_its_key(self, store: Store, is_tied: bool) -> None:
        """With merge the answer is the running task, also if others of the batch wait for the merged one."""
        (running,) = await start(store, a_record(key=KEY, consumer="shrink"))
        merged, other, child = a_task(), a_task(key="eight"), a_task(key="nine")
        after = {child.uuid: [merged.uuid]} if is_tied else {}
        (added,) = (await store.turn(A, adds=[Add([merged, other, child], Dedupe.MERGE, after=after)])).added
        assert added == [Added(running.uuid, is_new=False), Added(other.uuid), Added(child.uuid)]
        assert await state_of(store, child) is (TaskState.BLOCKED if is_tied else TaskState.QUEUED)
        assert merged.uuid not in await everything(store)

    @pytest.mark.spec("QUE-19")
    async def test_nothing_is_replaced_while_the_key_runs(self, store: Store, clock: ManualClock) -> None:
        """With replace a task of a running key is refused, also if the same work is queued, which stays there; once the
        key is idle, the queued one makes way."""
        queued, new = a_task(), a_task()
        (running,) = await start(store, a_record(key=KEY))
        await add(store, pending(queued), dedupe=Dedupe.REFUSE)
        assert await holder(store, new, Dedupe.REPLACE) == running.uuid
        assert await state_of(store, queued) is TaskState.QUEUED
        await settle(store, running, Move.completed(at=clock.now()))
        assert await holder(store, new, Dedupe.REPLACE) is None
        assert await state_of(store, queued) is TaskState.CANCELED

    @pytest.mark.spec("QUE-19")
    async def test_a_key_that_only_waits_is_idle(self, store: Store) -> None:
        """While tasks of a key wait, other work of it is accepted; the same work is not, and that task is named."""
        first, second = a_task(), a_task("weekly")
        assert await holder(store, first) is None
        assert await holder(store, second) is None
        refused = await refusal(store, a_task())
        assert refused is not None
        assert (refused.existing, refused.key) == (first.uuid, None)
        assert await try_add(store, a_task("weekly"), dedupe=Dedupe.MERGE) == [Added(second.uuid, is_new=False)]

    async def test_the_same_work_comes_before_the_same_key(self, store: Store) -> None:
        """If one task of the key runs and another stands for the work, a new one is merged into the second."""
        queued = a_task()
        await add(store, queued, dedupe=Dedupe.REFUSE)
        await store.apply([queued.uuid], Hold())
        (running,) = await start(store, a_record(key=KEY))
        assert await try_add(store, a_task(), dedupe=Dedupe.MERGE) == [Added(queued.uuid, is_new=False)]
        assert await holder(store, a_task()) == queued.uuid
        assert await holder(store, a_task("weekly")) == running.uuid

    async def test_a_key_is_busy_in_its_own_queue_only(self, store: Store) -> None:
        """The same key in another queue, another key and no key are idle."""
        await start(store, a_record(key=KEY))
        for record in (a_task("cpu", queue="cpu"), a_task(key="eight"), a_task(key=None)):
            assert await holder(store, record) is None

    @pytest.mark.parametrize("scope", [DedupeScope.PENDING, DedupeScope.QUEUED, DedupeScope.WINDOW])
    async def test_other_scopes_do_not_ask_for_the_key(self, store: Store, scope: DedupeScope) -> None:
        """A running key keeps out nothing but tasks of this scope."""
        await start(store, a_record(key=KEY))
        other = a_record(key=KEY, dedupe_slot="other", dedupe_scope=scope)
        (added,) = (await store.turn(A, adds=[Add([other], Dedupe.REFUSE, window_s=60.0)])).added
        assert added == [Added(other.uuid)]
        assert await try_add(store, allowed := a_task()) == [Added(allowed.uuid)]

    @pytest.mark.parametrize("dedupe", [Dedupe.REFUSE, Dedupe.MERGE, Dedupe.REPLACE])
    async def test_of_several_running_tasks_the_oldest_is_named(self, store: Store, dedupe: Dedupe) -> None:
        """Where several tasks of a key may run at once, the answer is the one that was added first."""
        await store.set_queue(QueueSettings(name="default", per_key=2))
        first, second = a_record(key=KEY), a_record(key=KEY)
        await add(store, first, second)
        assert len(await claim(store, 2)) == 2
        answer = await try_add(store, a_task(), dedupe=dedupe)
        if dedupe is Dedupe.MERGE:
            assert answer == [Added(first.uuid, is_new=False)]
        else:
            assert isinstance(answer, DuplicateTask)
            assert answer.existing == first.uuid

    @pytest.mark.spec("QUE-19")
    @pytest.mark.parametrize("how", ["given-back", "interrupted", "retrying"])
    async def test_a_task_that_is_to_run_again_stands_for_its_work(
        self, store: Store, clock: ManualClock, how: str
    ) -> None:
        """A task that was given back, taken from a dead node or waits for a retry is not accepted a second time; other
        work of its key is, since that does not run."""
        held = await self.run(store, a_task())
        if how == "given-back":
            await settle(store, held, Move.given_back(at=clock.now(), note=Note(NoteCode.NODE_STOPPED)))
        elif how == "interrupted":
            await store.rescue(A)
        else:
            due = clock.now() + seconds(9)
            await settle(store, held, Move.retrying(at=clock.now(), due_at=due, error=an_error()))
        refused = await refusal(store, a_task())
        assert refused is not None
        assert (refused.existing, refused.key) == (held.uuid, None)
        assert await holder(store, a_task("weekly")) is None

    async def test_a_run_that_ends_in_the_same_turn_frees_its_key(self, store: Store, clock: ManualClock) -> None:
        """A turn settles before it adds, and claims after it: the end of a run counts, the start of one does not."""
        held = await self.run(store, a_task())
        second, third = a_task("weekly"), a_task("monthly")
        settles = [(held, Move.completed(at=clock.now()))]
        adds = [Add([second], Dedupe.REFUSE), Add([third], Dedupe.REFUSE)]
        turned = await store.turn(A, settles=settles, adds=adds, demand=room(9))
        assert turned.added == [[Added(second.uuid)], [Added(third.uuid)]]
        assert [one.uuid for one in turned.claims] == [second.uuid]
        assert await holder(store, a_task()) == second.uuid

    async def test_a_batch_is_answered_task_by_task(self, store: Store) -> None:
        """Of many accounts in one batch those that run, or are in it before, are merged, and the others stored; with
        refuse one of them keeps the batch out."""
        (running,) = await start(store, a_record(key="2"))
        batch = [a_task(key=str(n % 4)) for n in range(6)]
        added = await add(store, *batch, dedupe=Dedupe.MERGE)
        assert [(one.uuid, one.is_new) for one in added] == [
            (batch[0].uuid, True), (batch[1].uuid, True), (running.uuid, False), (batch[3].uuid, True),
            (batch[0].uuid, False), (batch[1].uuid, False),
        ]  # fmt: skip
        before = set(await everything(store))
        refused = await try_add(store, a_task(key="5"), a_task(key="2"), dedupe=Dedupe.REFUSE)
        assert isinstance(refused, DuplicateTask)
        assert refused.existing == running.uuid
        assert set(await everything(store)) == before

    async def test_of_tasks_for_one_work_the_first_that_may_be_stored_is(self, store: Store) -> None:
        """In a batch where only some ask for the key, a task that is kept out by it stands for nothing: the next for
        the same work is stored, and those after it are merged into that one."""
        (running,) = await start(store, a_record(key=KEY))
        first, second, third = a_task(), pending(a_task()), a_task()
        added = await add(store, first, second, third, dedupe=Dedupe.MERGE)
        assert added == [
            Added(running.uuid, is_new=False), Added(second.uuid), Added(second.uuid, is_new=False),
        ]  # fmt: skip

    @pytest.mark.parametrize("command", [Cancel(), Skip()], ids=["canceled", "skipped"])
    async def test_a_task_that_is_called_off_stands_for_nothing(self, store: Store, command: Cancel | Skip) -> None:
        """A waiting task that is canceled or skipped may be added again at once."""
        first = a_task()
        await add(store, first, dedupe=Dedupe.REFUSE)
        await store.apply([first.uuid], command)
        assert await holder(store, a_task()) is None

    async def test_a_held_task_stands_for_its_work(self, store: Store) -> None:
        """Held and released, a task stands for its work all the time."""
        first = a_task()
        await add(store, first, dedupe=Dedupe.REFUSE)
        for command in (Hold(), Release()):
            await store.apply([first.uuid], command)
            assert await holder(store, a_task()) == first.uuid

    async def test_a_retry_takes_its_work_back_unless_it_is_taken(self, store: Store, clock: ManualClock) -> None:
        """A failed task that is sent again stands for its work, also while its key runs, since a person asked for it;
        while another stands for the work, it is refused."""
        held = await self.run(store, a_task())
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        (running,) = await start(store, a_record(key=KEY))
        (applied,) = await store.apply([held.uuid], Retry())
        assert applied.record is not None
        assert applied.record.state is TaskState.QUEUED
        await settle(store, running, Move.completed(at=clock.now()))
        assert await holder(store, a_task()) == held.uuid
        (again,) = await claim(store)
        await settle(store, again, Move.failed(at=clock.now(), error=an_error()))
        other = a_task()
        assert await holder(store, other) is None
        (applied,) = await store.apply([held.uuid], Retry())
        assert isinstance(applied.refused, SlotTaken)
        assert applied.refused.holder == other.uuid

    async def quarantine(self, store: Store, clock: ManualClock, consumer: str = "fetch") -> DeviceStore:
        """The account `KEY` with this consumer, in the pool "default"."""
        assert isinstance(store, DeviceStore)
        stamp = AuditStamp("ana", clock.now(), "banned")
        await store.quarantine_account(
            QuarantinedAccount(pool="default", account=KEY, consumer=consumer, failures=5, quarantined=stamp)
        )
        return store

    @pytest.mark.parametrize("is_tied", [False, True])
    @pytest.mark.parametrize("dedupe", [Dedupe.REFUSE, Dedupe.MERGE, Dedupe.REPLACE])
    async def test_a_task_of_a_quarantined_account_is_refused(
        self, store: Store, clock: ManualClock, dedupe: Dedupe, is_tied: bool
    ) -> None:
        """Whatever the rule for duplicates is, with all that was submitted beside it, until the account is released."""
        devices = await self.quarantine(store, clock)
        other, out, child = a_task(key="eight"), a_task(), a_task(key="nine")
        after = {child.uuid: [other.uuid]} if is_tied else {}
        batch = Add([other, out, child], dedupe, after=after)
        (refused,) = (await store.turn(A, adds=[batch])).added
        assert isinstance(refused, AccountQuarantined)
        assert (refused.account, refused.consumer, refused.pool) == (KEY, "fetch", "default")
        assert await everything(store) == {}
        await devices.release_account("default", KEY, None, by="ana")
        (added,) = (await store.turn(A, adds=[batch])).added
        assert added == [Added(other.uuid), Added(out.uuid), Added(child.uuid)]

    async def test_only_an_account_with_its_consumer_and_pool_is_quarantined(
        self, store: Store, clock: ManualClock
    ) -> None:
        """Another consumer, another pool and another account are taken, and so is a task without the scope."""
        await self.quarantine(store, clock, consumer="weekly")
        plain = a_record(key=KEY, consumer="weekly", dedupe_slot="plain")
        taken = [a_task(), a_task(queue="phones", slot="p"), a_task(key="eight"), plain]
        for one in taken:
            await add(store, one, dedupe=Dedupe.REFUSE)
        assert len(await everything(store)) == len(taken)

    async def test_a_quarantined_account_with_a_task_that_waits(self, store: Store, clock: ManualClock) -> None:
        """Not even a merge into the task that waits already is an answer, and that one stays."""
        await add(store, waiting := a_task(), dedupe=Dedupe.REFUSE)
        await self.quarantine(store, clock)
        for dedupe in (Dedupe.REFUSE, Dedupe.MERGE, Dedupe.REPLACE):
            assert isinstance(await try_add(store, a_task(), dedupe=dedupe), AccountQuarantined)
        assert list(await everything(store)) == [waiting.uuid]


def pending(record: TaskRecord) -> TaskRecord:
    """The same with the scope `pending`, which does not ask for the key."""
    record.dedupe_scope = DedupeScope.PENDING
    return record
