"""A queue played forward: in which order it starts, when, and what if."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from taskyard.model.blocker import encode_requirements
from taskyard.model.forecast import forecast
from taskyard.model.queue import QueueControl, QueueOrder, QueueSettings, QueueState
from taskyard.model.queue_order import QueueOrderView, QueueSnapshot
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, NodeScene, QueueScene, Reason, Scene
from taskyard.testing.samples import NOON, a_record, seconds

pytestmark = pytest.mark.spec("QUE-32")

MINUTE = {"fetch": 60.0}
NODE = NodeScene(label="one", incarnation="one", consumers=["fetch", "shrink"], max_running=100)


def waiting(count: int, *, first: int = 1, **fields: Any) -> list[TaskRecord]:
    """Tasks that are queued, in the order of their places. Their ids count from `first`."""
    return [
        a_record(state=TaskState.QUEUED, queue="cpu", id=n, position=n, **fields) for n in range(first, first + count)
    ]


def running(task_id: int, ago_s: float = 0, **fields: Any) -> TaskRecord:
    started_at = NOON - seconds(ago_s)
    return a_record(state=TaskState.RUNNING, queue="cpu", id=task_id, started_at=started_at, node="one", **fields)


def a_snapshot(
    records: Sequence[TaskRecord],
    *,
    nodes: Sequence[NodeScene] = (NODE,),
    control: QueueControl | None = None,
    unread: int = 0,
    has_keys: bool = False,
    **rules: Any,
) -> QueueSnapshot:
    """These tasks in a queue with these rules, and so many more of `fetch` that were not read."""
    counts: dict[TaskState, int] = {}
    consumers: dict[str, int] = {"fetch": unread} if unread else {}
    for record in records:
        counts[record.state] = counts.get(record.state, 0) + 1
        if record.state is TaskState.QUEUED:
            consumers[record.consumer] = consumers.get(record.consumer, 0) + 1
    counts[TaskState.QUEUED] = counts.get(TaskState.QUEUED, 0) + unread
    queue = QueueScene(settings=QueueSettings(name="cpu", **rules), control=control or QueueControl())
    scene = Scene(now=NOON, queues={"cpu": queue}, nodes=nodes)
    return QueueSnapshot(
        queue="cpu", scene=scene, counts=counts, consumers=consumers, records=records, has_keys=has_keys
    )


def ids(view: QueueOrderView, records: Sequence[TaskRecord]) -> list[int]:
    by_uuid = {record.uuid: record.id for record in records}
    return [by_uuid[entry.uuid] for entry in view.waiting]


def starts(view: QueueOrderView) -> list[float | None]:
    """Seconds from now until each starts."""
    return [
        None if entry.expected_start_at is None else (entry.expected_start_at - NOON).total_seconds()
        for entry in view.waiting
    ]


def test_what_if_more_ran_at_once():
    """One after the other, four tasks of a minute take four minutes; two at a time they take two."""
    view = forecast(a_snapshot(waiting(4), concurrency=1), MINUTE, limit=20, concurrency=2)
    assert starts(view) == [0, 60, 120, 180]
    assert (view.finished_at, view.is_exact) == (NOON + seconds(240), True)
    assert view.what_if is not None
    assert (view.what_if.finished_at, view.what_if.slots) == (NOON + seconds(120), 2)
    what_if_starts = [entry.what_if_start_at for entry in view.waiting]
    assert what_if_starts == [NOON, NOON, NOON + seconds(60), NOON + seconds(60)]


def test_more_concurrency_than_the_workers_have_room_for_changes_nothing():
    """What a node takes is a limit as well: the answer says how many would run at once."""
    node = NodeScene(label="one", incarnation="one", consumers=["fetch"], limits={"fetch": 2}, max_running=100)
    view = forecast(a_snapshot(waiting(4), nodes=[node], concurrency=2), MINUTE, limit=20, concurrency=9)
    assert view.what_if is not None
    assert (view.slots, view.what_if.slots) == (2, 2)
    assert view.what_if.finished_at == view.finished_at == NOON + seconds(120)


def test_a_run_takes_what_is_left_of_its_median():
    """A task that runs frees its slot when its median is over."""
    records = [running(1, 45), running(2, 30), *waiting(2, first=3)]
    view = forecast(a_snapshot(records, concurrency=2), MINUTE, limit=20)
    assert starts(view) == [15, 30]
    assert [entry.expected_end_at for entry in view.running] == [NOON + seconds(15), NOON + seconds(30)]
    assert not any(entry.is_late or entry.is_estimated for entry in (*view.running, *view.waiting))
    assert view.is_exact


def test_a_run_that_takes_longer_than_its_median_has_no_expected_end():
    """It is taken to run as long again. What starts after it is estimated, and so is the end of the queue."""
    records = [running(1, 90), *waiting(2, first=2)]
    view = forecast(a_snapshot(records, concurrency=1), MINUTE, limit=20)
    (late,) = view.running
    assert (late.expected_end_at, late.is_late) == (None, True)
    assert starts(view) == [90, 150]
    assert [entry.is_estimated for entry in view.waiting] == [True, True]
    assert (view.finished_at, view.is_exact) == (NOON + seconds(210), False)


def test_what_starts_at_once_does_not_depend_on_a_late_run():
    """With a free slot beside a run that is late, the next task surely starts now; the one after it is estimated."""
    records = [running(1, 90), *waiting(2, first=2)]
    view = forecast(a_snapshot(records, concurrency=2), MINUTE, limit=20)
    assert starts(view) == [0, 60]
    assert [entry.is_estimated for entry in view.waiting] == [False, True]


def test_a_long_run_without_a_median_does_not_end_now():
    """However long a task of unknown length, or one on a node that died, has run: what needs its slot has no time."""
    lost = running(1, 500)
    lost.node = "gone"
    for record in (lost, running(1, 500, consumer="shrink")):
        view = forecast(a_snapshot([record, *waiting(1, first=2)], concurrency=1), MINUTE, limit=20)
        assert starts(view) == [None]
        assert view.running[0].expected_end_at is None


def test_without_a_median_the_order_is_known_and_the_times_are_not():
    """Before a consumer has runs enough, its tasks have places and no expected start, nor has the queue an end."""
    high, normal = waiting(2, first=10, priority=0), waiting(2)
    view = forecast(a_snapshot([*normal, *high], concurrency=1), {}, limit=20)
    assert ids(view, [*normal, *high]) == [10, 11, 1, 2]
    assert starts(view) == [None] * 4
    assert view.finished_at is None


def test_what_starts_after_a_run_of_unknown_length_has_no_time():
    """Until a consumer without a median has its turn, times are known; after that they are left out."""
    records = [*waiting(2), *waiting(1, first=3, consumer="shrink"), *waiting(2, first=4)]
    view = forecast(a_snapshot(records, concurrency=1), MINUTE, limit=20)
    assert starts(view) == [0, 60, None, None, None]


def test_the_end_of_a_long_queue_is_estimated():
    """Of tasks that were not read the number alone counts: a thousand of a minute, two at a time."""
    view = forecast(a_snapshot(waiting(20), unread=980, concurrency=2), MINUTE, limit=20)
    assert view.waiting_count == 1000
    assert len(view.waiting) == 20
    assert not view.is_exact
    assert view.finished_at == NOON + seconds(1000 * 60 / 2)


def test_the_end_of_a_long_queue_with_keys_is_a_lower_bound():
    """Tasks of one key run one after the other, however many slots there are: those that were read are added up, and
    what was not read may be of the same key."""
    records = waiting(21, key="account")
    for record in records[1:]:
        record.is_parked = True
    view = forecast(a_snapshot(records, unread=479, has_keys=True, concurrency=8), MINUTE, limit=20, concurrency=9)
    assert view.finished_at is not None
    assert view.finished_at >= NOON + seconds(21 * 60)
    assert (view.is_exact, view.is_lower_bound) == (False, True)
    assert view.what_if is not None
    assert view.what_if.is_lower_bound


def test_keys_that_were_read_are_added_up():
    """The tasks of one key that are not listed take their time one after the other."""
    records = waiting(100, key="account")
    for record in records[1:]:
        record.is_parked = True
    view = forecast(a_snapshot(records, has_keys=True, concurrency=8), MINUTE, limit=20)
    assert view.finished_at is not None
    assert NOON + seconds(99 * 60) <= view.finished_at <= NOON + seconds(100 * 60)


def test_the_end_of_a_queue_with_keys_that_was_read_is_exact():
    """If all tasks are listed, keys are played, and the end is no lower bound."""
    records = waiting(3, key="account")
    for record in records[1:]:
        record.is_parked = True
    view = forecast(a_snapshot(records, has_keys=True, concurrency=8), MINUTE, limit=20)
    assert (view.finished_at, view.is_exact, view.is_lower_bound) == (NOON + seconds(180), True, False)


def test_places_are_listed_as_far_as_they_are_known():
    """After the last task that was read of a lane with more, nobody knows which task starts next: the list ends."""
    records = [*waiting(3), *waiting(9, first=10, consumer="shrink")]
    snapshot = msgspec.structs.replace(a_snapshot(records, unread=50, concurrency=2), cuts={3})
    view = forecast(snapshot, MINUTE, limit=20)
    assert ids(view, records) == [1, 2, 3]
    assert not view.is_exact


def test_what_is_listed_does_not_depend_on_how_much():
    """The first three places are the same whether three or twenty are listed."""
    records = [*waiting(9, key="a"), *waiting(9, first=20, priority=0), *waiting(3, first=40, priority=2)]
    views = [forecast(a_snapshot(records, concurrency=2), MINUTE, limit=limit) for limit in (3, 20)]
    assert ids(views[0], records) == ids(views[1], records)[:3]


def test_a_key_makes_its_tasks_wait_for_each_other():
    """Two of one key run one after the other, though there is room for both; one without a key passes."""
    first, second = waiting(2, key="account")
    second.is_parked = True
    records = [first, second, *waiting(1, first=3)]
    view = forecast(a_snapshot(records, concurrency=2), MINUTE, limit=20)
    assert ids(view, records) == [1, 3, 2]
    assert starts(view) == [0, 0, 60]


def test_what_holds_up_others_is_passed_in_the_list():
    """Behind a held head of a strict queue places are shown, without times; the head is apart."""
    held = a_record(state=TaskState.PAUSED, queue="cpu", id=1, position=1)
    records = [held, *waiting(3, first=2)]
    view = forecast(a_snapshot(records, concurrency=1, order=QueueOrder.FIFO), MINUTE, limit=20)
    assert ids(view, records) == [2, 3, 4]
    assert starts(view) == [None] * 3
    assert [entry.uuid for entry in view.apart] == [held.uuid]


def test_a_paused_queue_keeps_its_places():
    """A queue that starts nothing is shown in the order in which it would go on, without times."""
    control = QueueControl(state=QueueState.PAUSED)
    records = [*waiting(2), *waiting(1, first=9, priority=0)]
    view = forecast(a_snapshot(records, control=control, concurrency=1), MINUTE, limit=20, concurrency=2)
    assert ids(view, records) == [9, 1, 2]
    assert starts(view) == [None] * 3
    assert view.finished_at is None
    assert view.waiting[0].why is not None
    assert view.waiting[0].why.reason is Reason.QUEUE_PAUSED


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_task_that_is_due_much_later_does_not_change_the_places(is_paused: bool):
    """Of a paused queue, or one without workers, patience is counted from now on: a low task does not come first
    because another one is due in an hour."""
    later = a_record(state=TaskState.SCHEDULED, queue="cpu", id=99, due_at=NOON + seconds(3600))
    records = [*waiting(1, priority=2), *waiting(3, first=5), later]
    control = QueueControl(state=QueueState.PAUSED) if is_paused else None
    nodes = [NODE] if is_paused else []
    view = forecast(a_snapshot(records, nodes=nodes, control=control, concurrency=1), MINUTE, limit=20)
    assert ids(view, records) == [5, 6, 7, 1]
    assert starts(view) == [None] * 4


def test_tasks_that_no_node_serves_come_last():
    """A consumer without a worker waits behind all others, and nobody knows when the queue will be empty."""
    records = [*waiting(2, consumer="unknown"), *waiting(2, first=5)]
    view = forecast(a_snapshot(records, concurrency=1), {**MINUTE, "unknown": 60.0}, limit=20)
    assert ids(view, records) == [5, 6, 1, 2]
    assert starts(view) == [0, 60, None, None]
    assert view.finished_at is None


def test_what_runs_on_a_node_that_died_ends_at_no_known_time():
    """Its slot is not free before the task is taken back: nothing that needs the slot has an expected start."""
    lost = running(1)
    lost.node = "gone"
    view = forecast(a_snapshot([lost, *waiting(1, first=2)], concurrency=1), MINUTE, limit=20)
    assert starts(view) == [None]


def test_what_runs_of_other_queues_keeps_its_room():
    """A node that is busy with tasks of another queue has that much less room."""
    busy = {"fetch": Busy(count=3, uuid="other", started_at=NOON)}
    node = NodeScene(label="one", incarnation="one", consumers=["fetch"], max_running=4, running=busy)
    assert starts(forecast(a_snapshot(waiting(3), nodes=[node]), MINUTE, limit=20)) == [0, 60, 120]


def test_a_node_that_serves_others_has_no_room_for_these():
    """What a node may run of other consumers does not count: the node that serves these runs one at a time."""
    small = NodeScene(label="one", incarnation="one", consumers=["fetch"], max_running=1)
    other = NodeScene(label="two", incarnation="two", consumers=["shrink"])
    view = forecast(a_snapshot(waiting(2), nodes=[small, other]), MINUTE, limit=20)
    assert starts(view) == [0, 60]
    assert view.slots == 1


def test_a_task_starts_only_at_a_place_that_fits():
    """Of two places one has what the first two tasks require: they run one after the other, and a third passes."""
    places = {"fetch": [{"gpu": "a100"}, {}]}
    node = NodeScene(
        label="one", incarnation="one", consumers=["fetch"], limits={"fetch": 2}, max_running=9, places=places
    )
    records = [*waiting(2, requires=encode_requirements({"gpu": "a100"})), *waiting(1, first=3)]
    view = forecast(a_snapshot(records, nodes=[node]), MINUTE, limit=20)
    assert ids(view, records) == [1, 3, 2]
    assert starts(view) == [0, 0, 60]


def test_an_executor_that_consumers_share_is_a_limit():
    """Consumers that use one executor together run no more than it has room for."""
    node = NodeScene(
        label="one",
        incarnation="one",
        consumers=["fetch", "shrink"],
        limits={"fetch": 9, "shrink": 9},
        executors={"fetch": "thread", "shrink": "thread"},
        capacities={"thread": 2},
    )
    view = forecast(a_snapshot(waiting(4), nodes=[node]), MINUTE, limit=20)
    assert starts(view) == [0, 0, 60, 60]
    assert view.slots == 2


def test_what_becomes_due_takes_its_turn():
    """A task that waits for its time is apart, and takes a slot when that has come."""
    later = a_record(state=TaskState.SCHEDULED, queue="cpu", id=9, priority=0, due_at=NOON + seconds(90))
    view = forecast(a_snapshot([*waiting(4), later], concurrency=1), MINUTE, limit=20)
    assert starts(view) == [0, 60, 180, 240]
    assert [(entry.uuid, entry.expected_start_at) for entry in view.apart] == [(later.uuid, None)]


def test_a_snapshot_is_left_as_it_was():
    """To forecast changes no record: the same snapshot answers another question."""
    snapshot = a_snapshot([*waiting(4, key="a"), running(9)])
    before = [record.clone() for record in snapshot.records]
    forecast(snapshot, MINUTE, limit=20, concurrency=3)
    assert list(snapshot.records) == before
