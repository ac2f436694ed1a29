"""The checker of simulated histories: sound ones pass, and every fault it is for is found."""

from datetime import timedelta
from typing import Any

import pytest

from taskyard.model.event import Event, EventKind
from taskyard.model.queue import QueueSettings
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState as S
from taskyard.model.task import Attempt, Dedupe
from taskyard.testing.ledger import Stored
from taskyard.testing.samples import NOON, a_record
from taskyard.testing.simulation.history import End, Fate, History, Kind, Op, Start, Submitted
from taskyard.testing.simulation.judge import judge_history
from taskyard.testing.simulation.linear import View, explain

# --- linearizability --------------------------------------------------------------------------------------------------

DONE, REFUSED, UNKNOWN, NEVER = Fate.DONE, Fate.REFUSED, Fate.UNKNOWN, Fate.NEVER


def op(kind: Kind, asked: int, answered: int | None, fate: Fate = DONE, **fields: Any) -> Op:
    return Op(kind=kind, task="t", asked=asked, answered=answered, fate=fate, **fields)


def submit(asked: int = 1, answered: int | None = 2, fate: Fate = DONE) -> Op:
    return op(Kind.SUBMIT, asked, answered, fate)


def claim(token: int, asked: int, answered: int | None, attempt: int = 1, node: str = "a") -> Op:
    return op(Kind.CLAIM, asked, answered, token=token, attempt=attempt, node=node)


def settle(token: int, state: S, asked: int, answered: int | None, fate: Fate = DONE) -> Op:
    return op(Kind.SETTLE, asked, answered, fate, token=token, state=state)


def rescue(asked: int, answered: int | None, fate: Fate = DONE, node: str = "a") -> Op:
    return op(Kind.RESCUE, asked, answered, fate, node=node)


def cancel(asked: int, answered: int | None, fate: Fate = DONE, found: S | None = None) -> Op:
    return op(Kind.CANCEL, asked, answered, fate, found=found)


def end(state: S, attempt: int = 1, recoveries: int = 0) -> View:
    return View(state, attempt=attempt, recoveries=recoveries)


RUN = [submit(), claim(5, 3, 4)]
FIRST_FAILED = [*RUN, settle(5, S.FAILED, 5, 6)]

SOUND = [
    pytest.param([submit()], end(S.QUEUED, 0), id="only-submitted"),
    pytest.param([submit(1, None, UNKNOWN)], None, id="a-lost-submit-that-was-none"),
    pytest.param([submit(1, None, UNKNOWN)], end(S.QUEUED, 0), id="a-lost-submit-that-was-one"),
    pytest.param([submit(1, 2, NEVER)], None, id="a-refused-submit"),
    pytest.param([*RUN, settle(5, S.COMPLETED, 5, 6)], end(S.COMPLETED), id="completed"),
    pytest.param(
        [*RUN, settle(5, S.COMPLETED, 5, None, UNKNOWN), settle(5, S.COMPLETED, 7, 8, REFUSED)],
        end(S.COMPLETED),
        id="settled-unheard-and-again",
    ),
    pytest.param(
        [*RUN, settle(5, S.RETRYING, 5, 6), claim(6, 7, 8, 2), settle(6, S.COMPLETED, 9, 10)],
        end(S.COMPLETED, 2),
        id="retried",
    ),
    pytest.param(
        [*RUN, settle(5, S.QUEUED, 5, 6), claim(6, 7, 8), settle(6, S.COMPLETED, 9, 10)],
        end(S.COMPLETED),
        id="given-back",
    ),
    pytest.param(
        [*RUN, rescue(5, 6), claim(6, 7, 8, 2, "b"), settle(5, S.COMPLETED, 7, 12, REFUSED)],
        end(S.RUNNING, 2, 1),
        id="a-stale-settle-is-refused",
    ),
    pytest.param([*RUN, rescue(5, 6), claim(6, 7, 8, 2), rescue(9, 10)], end(S.FAILED, 2, 1), id="given-up-twice"),
    pytest.param([*RUN, rescue(5, None, UNKNOWN)], end(S.QUEUED, 1, 1), id="rescued-unheard"),
    pytest.param([submit(), cancel(3, 4, found=S.CANCELED)], end(S.CANCELED, 0), id="canceled-while-waiting"),
    pytest.param(
        [*RUN, cancel(5, 9, found=S.RUNNING), settle(5, S.RETRYING, 6, 7)], end(S.CANCELED), id="a-cancel-comes-first"
    ),
    pytest.param(
        [*RUN, cancel(5, 9, REFUSED, S.COMPLETED), settle(5, S.COMPLETED, 6, 7)], end(S.COMPLETED), id="cancel-too-late"
    ),
    pytest.param([cancel(1, 2, REFUSED), submit(3, 4)], end(S.QUEUED, 0), id="canceled-before-it-was-there"),
    pytest.param(
        [*FIRST_FAILED, op(Kind.RETRY, 7, 8, found=S.QUEUED), op(Kind.PENDING, 9, 10)], end(S.QUEUED), id="sent-again"
    ),
    pytest.param([*FIRST_FAILED, op(Kind.ENDED, 3, 7, found=S.FAILED)], end(S.FAILED), id="waited-for"),
    pytest.param([*RUN, op(Kind.PRIORITY, 3, 5, REFUSED, found=S.RUNNING)], end(S.RUNNING), id="no-new-priority"),
]

BROKEN = [
    pytest.param([submit(1, 2, NEVER)], end(S.QUEUED, 0), id="refused-and-there"),
    pytest.param([submit()], None, id="acknowledged-and-not-there"),
    pytest.param([claim(5, 3, 4), submit(5, 6)], end(S.RUNNING), id="claimed-before-it-was-asked-for"),
    pytest.param([*RUN, claim(6, 5, 6, 2)], end(S.RUNNING, 2), id="claimed-twice"),
    pytest.param([*RUN, settle(5, S.COMPLETED, 5, 6, REFUSED)], end(S.RUNNING), id="refused-while-it-held"),
    pytest.param(
        [*RUN, rescue(5, 6), claim(6, 7, 8, 2), settle(5, S.COMPLETED, 9, 10)], end(S.COMPLETED, 2), id="stale-settle"
    ),
    pytest.param([*RUN, settle(5, S.COMPLETED, 5, 6)], end(S.FAILED), id="another-end"),
    pytest.param([*RUN, settle(5, S.RETRYING, 5, 6), claim(6, 7, 8)], end(S.RUNNING), id="an-attempt-not-counted"),
    pytest.param(
        [*RUN, cancel(5, 6, found=S.RUNNING), settle(5, S.RETRYING, 7, 8)], end(S.QUEUED), id="a-cancel-is-lost"
    ),
    pytest.param([*RUN, cancel(5, 6, REFUSED, S.RUNNING)], end(S.RUNNING), id="refused-without-a-reason"),
    pytest.param(
        [*RUN, cancel(5, 6, REFUSED, S.COMPLETED), settle(5, S.COMPLETED, 7, 8)], end(S.COMPLETED), id="seen-too-early"
    ),
    pytest.param([*RUN, rescue(5, 6, node="b")], end(S.QUEUED, 1, 1), id="taken-from-somebody-else"),
    pytest.param([*RUN, rescue(5, 6), claim(6, 7, 8, 2), rescue(9, 10)], end(S.QUEUED, 2, 2), id="rescued-too-often"),
    pytest.param([*RUN, op(Kind.ENDED, 5, 6, found=S.COMPLETED)], end(S.RUNNING), id="told-of-no-end"),
    pytest.param([submit(), op(Kind.ENDED, 3, 4, REFUSED)], end(S.QUEUED, 0), id="told-that-it-is-gone"),
    pytest.param([*FIRST_FAILED, op(Kind.PENDING, 7, 8)], end(S.FAILED), id="merged-into-what-had-ended"),
]


@pytest.mark.parametrize(("ops", "last"), SOUND)
def test_a_sound_order_is_found(ops: list[Op], last: View | None) -> None:
    """What faults and races rightly lead to can be explained."""
    assert explain(ops, last, auto_recover=1)


@pytest.mark.parametrize(("ops", "last"), BROKEN)
def test_what_cannot_be_explained_is_not(ops: list[Op], last: View | None) -> None:
    """An answer that no order of events could have led to is found."""
    assert not explain(ops, last, auto_recover=1)


# --- the rest ---------------------------------------------------------------------------------------------------------

QUEUES = {
    "default": QueueSettings(name="default"),
    "narrow": QueueSettings(name="narrow", concurrency=1),
    "keyed": QueueSettings(name="keyed", per_key=2),
}


class Story:
    """A history of tasks that are submitted, run once and completed, which a test then spoils."""

    def __init__(self) -> None:
        self.history = History()
        self.stored: dict[str, Stored] = {}
        self.events: list[Event] = []
        self.runs = 0

    def task(self, uuid: str, *, dedupe: Dedupe = Dedupe.ALLOW, batch: int = 0, **fields: Any) -> None:
        record = a_record(uuid=uuid, **{"consumer": "work", "state": S.COMPLETED, **fields})
        place = self.history.place()
        self.history.submitted[uuid] = Submitted(record, dedupe, batch or place, place, 0.0)
        self.history.answer(self.history.ask(Op(kind=Kind.SUBMIT, task=uuid, asked=place)), DONE)
        self.stored[uuid] = Stored(record, [])
        self.tell(uuid, EventKind.SUBMITTED)

    def tell(self, uuid: str, *kinds: EventKind) -> None:
        for kind in kinds:
            self.events.append(Event(len(self.events) + 1, NOON, kind, uuid, "work", "default"))

    def start(self, uuid: str, *, node: str = "a/1", at_mono: float = 1.0) -> int:
        self.runs += 1
        token, attempt = self.runs, len(self.stored[uuid].runs) + 1
        op = Op(kind=Kind.CLAIM, task=uuid, asked=self.history.place(), token=token, attempt=attempt, node=node)
        self.history.answer(self.history.ask(op), DONE)
        self.history.starts[token] = Start(uuid, token, node, self.history.place(), at_mono)
        self.stored[uuid].record.attempt = attempt
        self.tell(uuid, EventKind.STARTED)
        return token

    def settle(self, token: int, state: S = S.COMPLETED, **fields: Any) -> None:
        start = self.history.starts[token]
        one = self.stored[start.task]
        self.history.ends[token] = self.history.place()
        op = Op(kind=Kind.SETTLE, task=start.task, asked=self.history.place(), token=token, state=state, **fields)
        self.history.answer(self.history.ask(op), DONE)
        one.runs.append(Attempt(one.record.attempt, token, start.node, state, NOON, NOON))
        one.record.result = str(token)
        self.tell(start.task, EventKind(state))

    def run(self, uuid: str, **fields: Any) -> None:
        self.settle(self.start(uuid, **fields))

    def faults(self) -> list[str]:
        counts: dict[tuple[str, S], int] = {}
        for one in self.stored.values():
            key = (one.record.queue, one.record.state)
            counts[key] = counts.get(key, 0) + 1
        rules = {"queues": QUEUES, "room": {"work": 2}, "max_retries": 1}
        found = judge_history(self.history, End(self.stored, self.events, counts, **rules))  # type: ignore[arg-type]
        # The ledger is not written here; its own tests are in tests/crash.
        return [fault for fault in found if "and never ended" not in fault]


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_sound_story_passes(story: Story) -> None:
    """Tasks that were run within all limits are not blamed."""
    story.task("t", queue="narrow")
    story.task("u", queue="narrow")
    story.run("t")
    story.run("u")
    assert story.faults() == []


def test_a_full_queue_is_found(story: Story) -> None:
    """Two runs at once in a queue with room for one are found."""
    story.task("t", queue="narrow")
    story.task("u", queue="narrow")
    first, second = story.start("t"), story.start("u", node="b/2")
    story.settle(first)
    story.settle(second)
    assert any("which has room for 1" in fault for fault in story.faults())


def test_a_run_of_a_node_that_was_given_up_takes_no_room(story: Story) -> None:
    """What still runs on a node that was given up counts against no limit."""
    story.task("t", queue="narrow", recoveries=1)
    story.task("u", queue="narrow")
    stale = story.start("t")
    story.history.expired["a/1"] = story.history.place()
    rescued = Op(kind=Kind.RESCUE, task="t", asked=story.history.place(), node="a/1")
    story.history.answer(story.history.ask(rescued), DONE)
    story.stored["t"].runs.append(Attempt(1, stale, "a/1", S.INTERRUPTED, NOON, NOON))
    story.tell("t", EventKind.INTERRUPTED, EventKind.QUEUED)
    story.run("u", node="b/2")
    story.run("t", node="b/2")
    assert story.faults() == []


def test_a_busy_key_is_found(story: Story) -> None:
    """More runs at once with one key than its queue allows are found."""
    tokens = []
    for number, uuid in enumerate("tuv"):
        story.task(uuid, queue="keyed", key="k")
        tokens.append(story.start(uuid, node=f"n/{number}"))
    for token in tokens:
        story.settle(token)
    assert any("that run with key 'k'" in fault for fault in story.faults())


def test_a_full_node_is_found(story: Story) -> None:
    """More runs of a source on one node than it has room for are found."""
    for uuid in "tuv":
        story.task(uuid)
    for token in [story.start(uuid) for uuid in "tuv"]:
        story.settle(token)
    assert any("which has room for 2" in fault for fault in story.faults())


def test_an_early_start_is_found(story: Story) -> None:
    """A run before its task was due is found, unless the store's clock was ahead meanwhile."""
    story.task("t", due_at=NOON + timedelta(seconds=10))
    story.run("t", at_mono=9.0)
    assert story.faults() == ["task t: token 1 started before its time"]
    story.history.steps += [(3.0, 3600.0), (4.0, 0.0)]
    assert story.faults() == []


def test_an_early_retry_is_found(story: Story) -> None:
    """A retry before the wait is over that its first run was settled with is found."""
    story.task("t", retries=1)
    first = story.start("t")
    story.settle(first, S.RETRYING, due_at=NOON + timedelta(seconds=5), asked_mono=1.0)
    story.tell("t", EventKind.QUEUED)
    story.run("t", at_mono=4.0)
    assert story.faults() == ["task t: token 2 started before its time"]


def test_too_many_retries_are_found(story: Story) -> None:
    """More retries than the policy allows are found."""
    story.task("t", retry=RetryPolicy(max_retries=1))
    for _ in range(2):
        story.settle(story.start("t"), S.RETRYING, retried=True)
        story.tell("t", EventKind.QUEUED)
    story.run("t")
    assert story.faults() == ["task t: was retried 2 times, and 1 were allowed"]


def test_a_result_of_another_run_is_found(story: Story) -> None:
    """A result that the run which ended the task has not returned is found."""
    story.task("t")
    story.run("t")
    story.stored["t"].record.result = "17"
    assert story.faults() == ["task t: has the result of token 17, and token 1 ended it"]


def test_half_a_batch_is_found(story: Story) -> None:
    """Tasks that were submitted together and are only in part there are found."""
    story.task("t", batch=9)
    story.run("t")
    story.history.submitted["u"] = Submitted(a_record(uuid="u"), Dedupe.ALLOW, 9, 1, 0.0)
    assert story.faults() == ["task t: of a batch of 2 there are 1"]


def test_the_same_work_twice_is_found(story: Story) -> None:
    """Two tasks that stand for the same work at one time are found; one after the other is sound."""
    story.task("t", dedupe=Dedupe.MERGE, dedupe_slot="s")
    story.run("t")
    story.task("u", dedupe=Dedupe.MERGE, dedupe_slot="s")
    assert not any("stood for the same work" in fault for fault in story.faults())
    story.task("v", dedupe=Dedupe.MERGE, dedupe_slot="s")
    assert any("was added while u stood for the same work" in fault for fault in story.faults())


def test_a_move_out_of_turn_is_found(story: Story) -> None:
    """An event that the table of moves does not allow is found."""
    story.task("t")
    story.run("t")
    story.tell("t", EventKind.STARTED)
    assert story.faults() == ["task t: became running out of turn"]


def test_a_child_of_a_stale_run_is_found(story: Story) -> None:
    """A task that was submitted by a run whose node had been given up is found."""
    story.task("t")
    story.run("t")
    story.history.expired["a/1"] = story.history.place()
    story.task("u", state=S.QUEUED)
    asked = story.history.submitted["u"]
    story.history.submitted["u"] = Submitted(asked.record, asked.dedupe, asked.batch, asked.at, 0.0, ("a/1", 1))
    assert "task u: submitted by the stale run 1 of a/1" in story.faults()
