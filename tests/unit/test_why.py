"""Why a task waits, decided from what stands around it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from taskyard.model.blocker import Blocker
from taskyard.model.device import DeviceHealth, DeviceOrders, DeviceSpec, DeviceStatus
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.notes import AuditStamp, Note
from taskyard.model.queue import QueueControl, QueueOrder, QueueSettings, QueueState
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, First, Holder, NodeScene, QueueScene, Reason, Scene, Silence, Why, explain_wait

NOW = datetime(2026, 3, 1, 12, 3, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=5)
LATER = NOW + timedelta(minutes=5)
WORKER = NodeScene(label="one (5a0bd64d)", consumers=["zip"], limits={"zip": 2}, max_running=4)


WAITING = {TaskState.SCHEDULED, TaskState.QUEUED, TaskState.BLOCKED, TaskState.RETRYING, TaskState.PAUSED}


def a_record(**fields) -> TaskRecord:
    asked = {"state": TaskState.QUEUED, "queue": "media", **fields}
    return TaskRecord(uuid="t", consumer="zip", due_at=NOW, created_at=EARLIER, updated_at=NOW, **asked)


def a_scene(*, nodes=(WORKER,), control=None, running=None, **fields) -> Scene:
    settings = fields.pop("settings", None) or QueueSettings(name="media", concurrency=fields.pop("concurrency", None))
    queue = QueueScene(settings=settings, control=control or QueueControl(), running=running)
    return Scene(now=fields.pop("now", NOW), queues={"media": queue}, nodes=list(nodes), **fields)


def reason(record: TaskRecord, scene: Scene) -> Reason | None:
    why = explain_wait(record, scene)
    return None if why is None else why.reason


@pytest.mark.parametrize(
    "state",
    [
        TaskState.RUNNING,
        TaskState.COMPLETED,
        TaskState.FAILED,
        TaskState.CANCELED,
        TaskState.SKIPPED,
    ],
)
def test_what_does_not_wait_has_no_reason(state):
    """A task that runs or has ended waits for nothing."""
    assert explain_wait(a_record(state=state), a_scene()) is None


@pytest.mark.parametrize("now", [EARLIER, NOW])
@pytest.mark.parametrize("state", sorted(WAITING))
def test_whatever_waits_has_a_reason(state, now):
    """For every waiting task there is an answer, in words, with what would free it, and since when it holds."""
    why = explain_wait(a_record(state=state), Scene(now=now, queues={}, nodes=[]))
    assert why is not None
    assert why.text
    assert why.remedy
    assert why.since is not None


OTHER = NodeScene(label="two (00aa11bb)", consumers=[])
DIED = Silence("gone (dead0000)")
SILENT = Silence("gone (dead0000)", since=NOW - timedelta(seconds=7), lease_s=15.0)


@pytest.mark.parametrize(
    ("silence", "nodes", "text", "remedy", "until"),
    [
        (DIED, [OTHER], "has died; another takes the task back", "wait", None),
        (DIED, [], "has died, and there is no other to take the task back", "start a worker", None),
        (
            SILENT,
            [OTHER],
            "has been silent since 2026-03-01 12:02:53 UTC; another takes the task back when that was so for 15 s",
            "wait",
            NOW + timedelta(seconds=8),
        ),
        (
            SILENT,
            [NodeScene(label=SILENT.label, consumers=["zip"])],  # it is not given up yet
            "has been silent since 2026-03-01 12:02:53 UTC, and there is no other to take the task back",
            "start a worker; it takes the task back after 15 s",
            None,
        ),
    ],
)
def test_a_run_on_a_silent_node_waits_to_be_taken_back(silence, nodes, text, remedy, until):
    """What runs on a node that has died or is silent is told so, since when, and who takes it back and when."""
    record = a_record(state=TaskState.RUNNING, node="dead")
    why = explain_wait(record, a_scene(nodes=nodes, silent={"dead": silence}))
    assert why == Why(
        reason=Reason.NODE_SILENT,
        text=f"its node gone (dead0000) {text}",
        remedy=remedy,
        subject="gone (dead0000)",
        since=silence.since,
        until=until,
    )
    assert explain_wait(record, a_scene(silent={"another": silence})) is None


def test_what_was_to_be_taken_back_long_ago_has_no_time_in_the_past():
    """When the lease is over, the time of its end is not promised any more."""
    scene = a_scene(nodes=[OTHER], silent={"dead": SILENT}, now=NOW + timedelta(minutes=1))
    why = explain_wait(a_record(state=TaskState.RUNNING, node="dead"), scene)
    assert why is not None
    assert why.until is None


def test_a_time_that_has_not_come_is_named():
    """Scheduled until; backoff until, and what the last run ended with."""
    scene = a_scene(now=EARLIER)
    scheduled = explain_wait(a_record(state=TaskState.SCHEDULED), scene)
    error = ExecutionError(kind=ErrorKind.RUNTIME, message="no", types=("TimeoutError", "OSError"))
    retrying = explain_wait(a_record(state=TaskState.RETRYING, attempt=2, error=error), scene)
    assert scheduled is not None
    assert (scheduled.reason, scheduled.until) == (Reason.SCHEDULED, NOW)
    assert retrying is not None
    assert (retrying.reason, retrying.until) == (Reason.BACKOFF, NOW)
    assert retrying.text == "run 2 failed with TimeoutError; the next is due at 2026-03-01 12:03:00 UTC"


def test_asking_for_later_is_no_failure():
    """A run that asked to be tried again later is not called failed."""
    error = ExecutionError(kind=ErrorKind.RUNTIME, message="", types=("RetryLater",))
    why = explain_wait(a_record(state=TaskState.RETRYING, attempt=2, error=error), a_scene(now=EARLIER))
    assert why is not None
    assert why.text == "run 2 asked to be tried again later; the next is due at 2026-03-01 12:03:00 UTC"


def test_who_is_overdue_waits_for_something_else():
    """A task whose time has come, and that no node has queued yet, is asked about as if it were queued."""
    assert reason(a_record(state=TaskState.SCHEDULED), a_scene(nodes=[])) is Reason.NO_NODE
    assert reason(a_record(state=TaskState.RETRYING), a_scene()) is Reason.TURN


@pytest.mark.parametrize(
    ("hold", "text"),
    [(AuditStamp("ann", NOW, "wait for the disk"), "it is held by ann: wait for the disk"), (None, "it is held")],
)
def test_a_hold_says_who_and_why(hold, text):
    """What was said when the task was held is repeated; what its runs have noted is not."""
    why = explain_wait(a_record(state=TaskState.PAUSED, hold=hold, note=Note.remark("half done")), a_scene())
    assert why is not None
    assert (why.reason, why.text) == (Reason.HELD, text)


def test_a_dependency_is_named():
    """The first unfinished of those it waits for, and how many more."""
    scene = a_scene(parents={"t": ("p", TaskState.RUNNING)})
    why = explain_wait(a_record(state=TaskState.BLOCKED, open_dependencies=3), scene)
    assert why is not None
    assert (why.reason, why.blocker) == (Reason.DEPENDENCY, "p")
    assert why.text == "it waits for task p, which is running, and 2 more"


@pytest.mark.parametrize(("state", "verb"), [(QueueState.PAUSED, "is paused"), (QueueState.STOPPING, "is stopping")])
def test_a_closed_queue_says_who_and_why(state, verb):
    """Paused since when, by whom, and for what reason."""
    control = QueueControl(state=state, state_set=AuditStamp("cli", NOW, "backup"))
    why = explain_wait(a_record(), a_scene(control=control))
    assert why is not None
    assert why.text == f"queue 'media' {verb} since 2026-03-01 12:03:00 UTC by cli: backup"
    assert (why.reason, why.since) == (Reason.QUEUE_PAUSED, NOW)


def test_nobody_serves_its_source():
    """No node at all, nodes for other sources, or only nodes that are drained."""
    other = NodeScene(label="two", consumers=["mail"])
    drained = msgspec.structs.replace(WORKER, is_draining=True)
    stopping = msgspec.structs.replace(WORKER, label="three", is_stopping=True)
    for nodes in [(), (other,), (drained,), (other, drained), (stopping,)]:
        assert reason(a_record(), a_scene(nodes=nodes)) is Reason.NO_NODE
    assert reason(a_record(), a_scene(nodes=[drained, stopping, WORKER])) is Reason.TURN
    why = explain_wait(a_record(), a_scene(nodes=[drained, stopping]))
    assert why is not None
    assert why.text.endswith("take nothing new: one (5a0bd64d) is drained, three is stopping")
    assert why.since == NOW


@pytest.mark.parametrize(
    ("state", "text", "since"),
    [
        (TaskState.RUNNING, "key 'disk-1' is busy: task h holds it", NOW),
        (TaskState.RETRYING, "key 'disk-1' is kept for task h, which will be tried again", NOW),
        (TaskState.QUEUED, "task h with key 'disk-1' goes first", NOW),
    ],
)
def test_a_busy_key_names_its_holder(state, text, since):
    """A parked task names the task that holds its key, will do so again, or goes first; since when, and not before
    it was there itself."""
    scene = a_scene(holders={("media", "disk-1"): Holder("h", state, EARLIER)})
    why = explain_wait(a_record(key="disk-1", is_parked=True), scene)
    assert why is not None
    assert (why.reason, why.blocker, why.text, why.since) == (Reason.KEY_BUSY, "h", text, since)
    assert reason(a_record(key="disk-1"), scene) is Reason.TURN


@pytest.mark.parametrize(
    ("order", "line", "where"),
    [(QueueOrder.FIFO, "", "queue 'media'"), (QueueOrder.BUCKETS, "b", "queue 'media', bucket 'b',")],
)
def test_the_head_of_a_strict_queue_is_named(order, line, where):
    """Whoever stands behind the head of a strict queue, or of a bucket, is told who that is and how it is doing."""
    settings = QueueSettings(name="media", order=order)
    scene = a_scene(settings=settings, heads={("media", line): First("h", TaskState.PAUSED, LATER)})
    why = explain_wait(a_record(bucket="b"), scene)
    assert why is not None
    assert (why.reason, why.blocker, why.since) == (Reason.HEAD_OF_LINE, "h", LATER)
    assert why.text == f"{where} keeps to the order of arrival, and task h, which is paused, stands first"
    assert reason(msgspec.structs.replace(a_record(bucket="b"), uuid="h"), scene) is Reason.TURN


def test_a_full_queue_names_who_has_run_longest():
    """The queue's concurrency is used up; a person's word about it goes before the rule."""
    running = Busy(2, "r", EARLIER)
    why = explain_wait(a_record(), a_scene(concurrency=2, running=running))
    assert why is not None
    assert (why.reason, why.blocker, why.since) == (Reason.QUEUE_FULL, "r", NOW)
    early = explain_wait(msgspec.structs.replace(a_record(), due_at=EARLIER), a_scene(concurrency=2, running=running))
    assert early is not None
    assert early.since == EARLIER
    raised = a_scene(concurrency=2, running=running, control=QueueControl(concurrency=3))
    assert reason(a_record(), raised) is Reason.TURN


def test_full_nodes_are_told_apart():
    """All nodes at the limit of the source; all nodes full of anything; one with room."""
    of_source = msgspec.structs.replace(WORKER, running={"zip": Busy(2, "r", EARLIER)})
    of_all = msgspec.structs.replace(WORKER, running={"zip": Busy(1, "r", NOW), "mail": Busy(3, "m", EARLIER)})
    assert reason(a_record(), a_scene(nodes=[of_source])) is Reason.CONSUMER_FULL
    why = explain_wait(a_record(), a_scene(nodes=[of_all]))
    assert why is not None
    assert (why.reason, why.blocker) == (Reason.NODES_FULL, "m")
    assert reason(a_record(), a_scene(nodes=[of_source, of_all])) is Reason.CONSUMER_FULL
    assert reason(a_record(), a_scene(nodes=[of_source, WORKER])) is Reason.TURN


def test_a_full_executor_is_named():
    """What others run in the threads or processes that the task would run in is what holds it, with its longest run."""
    crowded = NodeScene(
        label="one",
        consumers=["zip", "mail", "post"],
        limits={"zip": 2, "mail": 9},
        max_running=9,
        executors={"zip": "process", "mail": "process"},
        capacities={"process": 3},
        running={"mail": Busy(2, "m", EARLIER), "zip": Busy(1, "z", NOW), "post": Busy(3, "p", EARLIER)},
    )
    why = explain_wait(a_record(), a_scene(nodes=[crowded]))
    assert why is not None
    assert (why.reason, why.blocker, why.since) == (Reason.EXECUTOR_FULL, "m", NOW)
    assert why.text.startswith("executor 'process', where 'zip' runs, has no room")
    own = msgspec.structs.replace(crowded, limits={"zip": 1})
    assert reason(a_record(), a_scene(nodes=[own])) is Reason.CONSUMER_FULL
    roomy = msgspec.structs.replace(crowded, capacities={"process": 4})
    assert reason(a_record(), a_scene(nodes=[crowded, roomy])) is Reason.TURN
    assert reason(msgspec.structs.replace(a_record(), consumer="post"), a_scene(nodes=[crowded])) is Reason.TURN


@pytest.mark.parametrize("state", sorted(WAITING))
def test_nothing_holds_a_task_before_it_is_there(state):
    """Whatever holds it, and however long that has been so: not since before the task was there."""
    late = msgspec.structs.replace(a_record(state=state, is_parked=True, key="k"), created_at=NOW, due_at=EARLIER)
    running = Busy(2, "r", EARLIER)
    full = msgspec.structs.replace(WORKER, running={"zip": running})
    for scene in (
        a_scene(),
        a_scene(concurrency=2, running=running),
        a_scene(nodes=[full]),
        a_scene(holders={("media", "k"): Holder("h", TaskState.RUNNING, EARLIER)}),
        a_scene(control=QueueControl(state=QueueState.PAUSED, state_set=AuditStamp("cli", EARLIER))),
    ):
        for record in (late, msgspec.structs.replace(late, is_parked=False)):
            why = explain_wait(record, scene)
            assert why is not None
            assert why.since is None or why.since >= NOW


def test_the_first_to_look_at_is_named():
    """Of several reasons the one that a person has to deal with first."""
    control = QueueControl(state=QueueState.PAUSED, state_set=AuditStamp("cli", NOW))
    everything = a_scene(control=control, concurrency=1, running=Busy(1, "r", EARLIER), nodes=[])
    assert reason(a_record(is_parked=True, key="k"), everything) is Reason.QUEUE_PAUSED
    assert reason(a_record(state=TaskState.PAUSED), everything) is Reason.HELD


PLACED = NodeScene(
    label="one",
    consumers=["zip"],
    limits={"zip": 2},
    max_running=9,
    places={"zip": [{"model": "a100"}, {"model": "t4"}]},
    running={"zip": Busy(2, "r", EARLIER)},
)


def test_busy_places_are_named_before_other_limits():
    """Where each place runs a task, another place is what helps, not a larger concurrency or max_running."""
    why = explain_wait(a_record(), a_scene(nodes=[PLACED]))
    assert why is not None
    assert (why.reason, why.text) == (Reason.PLACES_BUSY, "2 of the places fit, and none is free")
    assert why.remedy == "wait, or add a place"
    one_left = msgspec.structs.replace(PLACED, running={"zip": Busy(1, "r", EARLIER)})
    assert reason(a_record(), a_scene(nodes=[msgspec.structs.replace(one_left, max_running=1)])) is Reason.NODES_FULL
    needs = a_record(requires='{"model":"t4"}')
    assert reason(needs, a_scene(nodes=[one_left])) is Reason.PLACES_BUSY
    assert reason(a_record(requires='{"model":"h100"}'), a_scene(nodes=[PLACED])) is Reason.NO_PLACE


def a_device(number: int, **fields) -> DeviceStatus:
    """A device of the pool "media" with role=eu, which is up and idle unless `fields` say otherwise."""
    labels = fields.pop("labels", {"role": "eu"})
    spec = DeviceSpec(pool="media", name=f"emu-{number}", number=number, adapter="adb", labels=labels)
    health = fields.pop("health", DeviceHealth(is_up=True, since=EARLIER))
    return DeviceStatus(spec=spec, health=health, node="n", **fields)


IN_EU = a_record(requires='{"role":"eu"}')
BUSY_DEVICE = a_device(1, task="longest", busy_since=EARLIER)
DOWN = a_device(2, health=DeviceHealth(since=NOW, reason="no answer"))


def explain_on(*devices: DeviceStatus, record: TaskRecord = IN_EU) -> Why:
    why = explain_wait(record, a_scene(devices={"media": devices}))
    assert why is not None
    return why


def test_the_devices_of_a_pool_are_counted():
    """A task that may run on devices none of which is idle is told how many there are in each state, since when the
    first of those that are down is so and why, and what would free one."""
    also_busy = a_device(3, task="later", busy_since=NOW)
    elsewhere = a_device(4, labels={"role": "us"})
    why = explain_on(also_busy, BUSY_DEVICE, DOWN, elsewhere)
    since = "2026-03-01 12:03:00 UTC"
    assert why.text == f"no idle device with role=eu: 2 busy, 1 down since {since} (no answer)"
    assert (why.reason, why.blocker, why.since) == (Reason.DEVICES_BUSY, "longest", NOW)
    assert why.remedy == "wait until a task has ended, or get 'emu-2' to answer"
    assert explain_on(DOWN, elsewhere, record=a_record(requires='{"role":"us"}')).reason is Reason.TURN


def test_the_device_that_is_down_for_longest_is_named():
    """Of several devices that are down, the oldest time is told, with its reason; one without a time still counts."""
    older = a_device(5, health=DeviceHealth(since=EARLIER, reason="offline"))
    why = explain_on(DOWN, older, a_device(6, health=DeviceHealth()), record=a_record())
    assert why.text == "no idle device: 3 down since 2026-03-01 11:58:00 UTC (offline)"
    assert why.blocker is None


def test_devices_that_people_have_set_aside():
    """Devices that are drained, taken or quarantined are counted apart, and giving one of them back would help."""
    stamp = AuditStamp("ann", EARLIER)
    why = explain_on(
        a_device(7, orders=DeviceOrders(taken=stamp)),
        a_device(8, orders=DeviceOrders(drained=stamp)),
        a_device(9, orders=DeviceOrders(quarantined=stamp)),
    )
    assert why.text == "no idle device with role=eu: 1 draining, 1 taken, 1 quarantined"
    assert why.remedy == "give 'emu-8' back"


def test_labels_that_no_device_has():
    """If no device of the pool has the labels, the task is told so, whatever its node offers as places."""
    why = explain_on(BUSY_DEVICE, DOWN, record=a_record(requires='{"role":"jp"}'))
    assert (why.reason, why.text) == (Reason.NO_DEVICE, "no device has role=jp; the pool has 2 devices")
    assert why.subject == "media with role=jp"


def test_what_comes_before_the_devices():
    """A task whose account runs waits for its key, and one behind the head of its pool for the head."""
    keyed = msgspec.structs.replace(IN_EU, key="7", is_parked=True)
    assert explain_on(BUSY_DEVICE, record=keyed).reason is Reason.KEY_BUSY
    head = First("first", TaskState.QUEUED, EARLIER)
    settings = QueueSettings(name="media", order=QueueOrder.FIFO)
    scene = a_scene(settings=settings, heads={("media", ""): head}, devices={"media": [BUSY_DEVICE]})
    assert reason(IN_EU, scene) is Reason.HEAD_OF_LINE


CHECKS = msgspec.structs.replace(WORKER, checks=["file_lock"])


@pytest.mark.parametrize(
    ("blocked_by", "nodes", "text", "remedy"),
    [
        ("file_lock:a", [WORKER, CHECKS], "it waits for file lock a", "close the program that holds the file"),
        ("check:Locks", [CHECKS], "it waits for check Locks", "look at the log of the node"),
        ("disk:/a", [OTHER], "it waits for disk /a", "start a worker whose app has the consumer 'zip'"),
        (
            "disk:/a",
            [CHECKS],
            "it waits for disk /a, and no running worker of 'zip' has a check for disk",
            "start a worker whose app has a check for disk, or start the task now",
        ),
        (
            "check:Locks",
            [WORKER],
            "it waits for check Locks, and no running worker of 'zip' has an admission check",
            "start a worker whose app has an admission check, or start the task now",
        ),
    ],
)
def test_a_blocked_task_says_who_checks_it(blocked_by, nodes, text, remedy):
    """It goes on by itself only if a worker has the check; else it says what to do."""
    record = a_record(state=TaskState.BLOCKED, blocked_by=blocked_by, blocked_at=EARLIER)
    why = explain_wait(record, a_scene(nodes=nodes))
    assert why is not None
    assert (why.reason, why.text, why.since) == (Reason.BLOCKED, text, EARLIER)
    assert why.remedy.startswith(remedy)


def test_a_task_that_requires_what_nobody_checks_is_not_to_be_started():
    """Started by hand, it would wait for a place with this label."""
    record = a_record(state=TaskState.BLOCKED, blocked_by="disk:/a", requires='{"disk":"/a"}')
    why = explain_wait(record, a_scene())
    assert why is not None
    assert why.remedy == "start a worker whose app has a check for disk, or cancel the task"


def test_blocked_tasks_of_a_lane_hold_others_only_where_they_are_checked():
    """Without the check no node stops at the blocker of an earlier task."""
    blockers = {("media", "zip"): Blocker("file_lock", "a", EARLIER)}
    assert reason(a_record(), a_scene(nodes=[CHECKS], lane_blockers=blockers)) is Reason.BLOCKED
    assert reason(a_record(), a_scene(lane_blockers=blockers)) is Reason.TURN
