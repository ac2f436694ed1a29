"""Why a task waits: a typed reason, since when, what would free it and who stands in the way.

Pure: a store shows the `Scene` around a page of tasks, read in a few queries, and `explain_wait` names what holds each
of them. Where several things do, it names the one that a person would have to look at first: what was said of the task
itself, then of its queue, then who could run it at all, then who is in the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from taskyard.model.blocker import Blocker, BlockerKind, Labels, remedy_of, satisfies
from taskyard.model.device import DeviceState, DeviceStatus
from taskyard.model.notes import describe_hold
from taskyard.model.queue import UNTOUCHED, QueueControl, QueueOrder, QueueSettings, QueueState
from taskyard.model.settle import RETRY_LATER
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord


class Reason(StrEnum):
    """What holds a task."""

    HELD = "held"
    SCHEDULED = "scheduled"
    BACKOFF = "backoff"
    DEPENDENCY = "dependency"
    BLOCKED = "blocked"
    """A node checked whether it may start, and named what it has to wait for: a disk, a file lock."""
    NO_PLACE = "no place"
    """No node has a place with the labels that it requires."""
    PLACES_BUSY = "places busy"
    NO_DEVICE = "no device"
    """No device of its pool has the labels that it requires."""
    DEVICES_BUSY = "devices busy"
    """None of the devices that it may run on is idle."""
    QUEUE_PAUSED = "queue paused"
    NO_NODE = "no node"
    KEY_BUSY = "key busy"
    HEAD_OF_LINE = "head of line"
    QUEUE_FULL = "queue full"
    CONSUMER_FULL = "consumer full"
    EXECUTOR_FULL = "executor full"
    NODES_FULL = "nodes full"
    NODE_SILENT = "node silent"
    """It runs, by what is known, on a node that has died or seems to have: it waits to be taken back."""
    TURN = "turn"
    """Nothing holds it: it starts when those before it have, which is at once if there are none."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the answer in words, `remedy` what would free it. `since` is from when it has held the task, and never
    before the task was there to be held; of one that is held, or waits to be tried again, it is the last change to it.
    Where nobody has noted when it began, as that no node serves it, it is from when the task could have started: since
    then it has waited, for this or for something before it. `until` is when it ends by itself; `blocker` the uuid of
    the task in the way, if it is one.

    `subject` is the same as a value: by reason a key, the key of a blocker ("disk:/data"), a task, a queue, a bucket, a
    consumer, an executor, a node, who holds it, or the class of an error. Of one queue, tasks with the same reason and
    subject are freed together."""

    reason: Reason
    text: str
    remedy: str
    subject: str = ""
    since: datetime | None = None
    until: datetime | None = None
    blocker: str | None = None


class Busy(msgspec.Struct, frozen=True, gc=False):
    """How many run, and one of those that have run longest."""

    count: int
    uuid: str
    started_at: datetime

    def __add__(self, other: Busy) -> Busy:
        longest = min(self, other, key=lambda busy: busy.started_at)
        return Busy(self.count + other.count, longest.uuid, longest.started_at)


class QueueScene(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: its rules, what people have said about it, and what of it runs, on whatever node."""

    settings: QueueSettings
    control: QueueControl = UNTOUCHED
    running: Busy | None = None

    @property
    def concurrency(self) -> int | None:
        said = self.control.concurrency
        return self.settings.concurrency if said is None else said


class NodeScene(msgspec.Struct, frozen=True, kw_only=True):
    """A node that lives: what it serves, how much of it at once, and what it runs, by source. A source that is missing
    in `limits` has none of its own; `executors` and `capacities` are those that have a limit. `places` are the labels
    of each place of a consumer that has places; `checks` the requirements that an admission check judges."""

    label: str
    consumers: Sequence[str]
    incarnation: str = ""
    limits: Mapping[str, int] = {}
    max_running: int | None = None
    executors: Mapping[str, str] = {}
    capacities: Mapping[str, int] = {}
    places: Mapping[str, Sequence[Labels]] = {}
    checks: Sequence[str] = ()
    is_draining: bool = False
    is_stopping: bool = False
    running: Mapping[str, Busy] = {}

    def count_places(self, record: TaskRecord) -> int | None:
        """How many of its places fit the task; None if its consumer has no places and it requires none."""
        requires = {name: value for name, value in record.requirements.items() if name not in self.checks}
        places = self.places.get(record.consumer)
        if places is None:
            return 0 if requires else None
        return sum(satisfies(labels, requires) for labels in places)

    def has_check(self, kind: str) -> bool:
        """Whether it finds out that a blocker of this kind is gone. A check that failed has no kind of its own."""
        return bool(self.checks) if kind == BlockerKind.CHECK else kind in self.checks

    @property
    def takes_tasks(self) -> bool:
        return not self.is_draining and not self.is_stopping

    @property
    def is_full(self) -> bool:
        return self.max_running is not None and sum(busy.count for busy in self.running.values()) >= self.max_running

    def fills_executor_of(self, source: str) -> Busy | None:
        """What runs where this source runs, if that is as much as can."""
        executor = self.executors.get(source)
        beside = [busy for other, busy in self.running.items() if self.executors.get(other) == executor]
        if executor is None or not beside:
            return None
        total = sum(beside[1:], start=beside[0])
        return total if total.count >= self.capacities.get(executor, total.count + 1) else None

    def is_full_of(self, source: str) -> bool:
        busy, limit = self.running.get(source), self.limits.get(source)
        return busy is not None and limit is not None and busy.count >= limit


class Holder(msgspec.Struct, frozen=True, gc=False):
    """Who has a key: it runs, or will be tried again, or is the first that may start."""

    uuid: str
    state: TaskState
    started_at: datetime | None


class Silence(msgspec.Struct, frozen=True, gc=False):
    """A node that has died; or, where nodes have to say that they live, one that has said nothing since then, and is
    given up when that was so for `lease_s`."""

    label: str
    since: datetime | None = None
    lease_s: float | None = None


class First(msgspec.Struct, frozen=True, gc=False):
    """Who stands first in a line, and from when on it has been as it is: queued, held or given another place."""

    uuid: str
    state: TaskState
    since: datetime


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around some tasks, at `now`: their queues; the nodes that live; by incarnation, those that have died
    or are silent (which live until they are given up); by queue and key, who holds the key or goes first; by the uuid
    of a task, the first that it waits for; by queue and line, who stands first where nobody is passed over; by queue
    and lane, the blocker of the oldest task that is blocked there; and by pool, which is a queue, its devices."""

    now: datetime
    queues: Mapping[str, QueueScene]
    nodes: Sequence[NodeScene]
    silent: Mapping[str, Silence] = {}
    holders: Mapping[tuple[str, str], Holder] = {}
    parents: Mapping[str, tuple[str, TaskState]] = {}
    heads: Mapping[tuple[str, str], First] = {}
    lane_blockers: Mapping[tuple[str, str], Blocker] = {}
    devices: Mapping[str, Sequence[DeviceStatus]] = {}


def line_of(record: TaskRecord, settings: QueueSettings) -> str | None:
    """The line in which places alone count that the task stands in, if there is one."""
    if not settings.is_strict:
        return None
    return "" if settings.order is QueueOrder.FIFO else record.bucket or ""


def explain_wait(record: TaskRecord, scene: Scene) -> Why | None:
    """What holds the task; None if it runs on a node that lives, or has ended."""
    match record.state:
        case TaskState.RUNNING:
            return _explain_silence(record, scene)
        case TaskState.PAUSED:
            return _explain_hold(record)
        case TaskState.BLOCKED if record.blocked_by is not None:
            return _explain_blocker(record, scene)
        case TaskState.BLOCKED:
            return _explain_dependency(record, scene)
        case TaskState.SCHEDULED | TaskState.RETRYING if record.due_at > scene.now:
            return _explain_time(record)
        case TaskState.QUEUED | TaskState.SCHEDULED | TaskState.RETRYING:
            return _explain_turn(record, scene)
        case _:
            return None


def _explain_silence(record: TaskRecord, scene: Scene) -> Why | None:
    silence = scene.silent.get(record.node or "")
    if silence is None:
        return None
    since, lease_s = silence.since, silence.lease_s
    what = f"its node {silence.label} has " + ("died" if since is None else f"been silent since {_moment(since)}")
    until = None if since is None or lease_s is None else since + timedelta(seconds=lease_s)
    quiet = {node.label for node in scene.silent.values()}
    if all(node.label in quiet for node in scene.nodes):
        text, until = f"{what}, and there is no other to take the task back", None
        remedy = "start a worker" + ("" if lease_s is None else f"; it takes the task back after {lease_s:g} s")
    else:
        patience = "" if lease_s is None else f" when that was so for {lease_s:g} s"
        text, remedy = f"{what}; another takes the task back{patience}", "wait"
    return Why(
        reason=Reason.NODE_SILENT,
        text=text,
        remedy=remedy,
        subject=silence.label,
        since=since,
        until=until if until is not None and until > scene.now else None,
    )


def _explain_turn(record: TaskRecord, scene: Scene) -> Why:
    """Its time has come: what else holds it."""
    queue = scene.queues.get(record.queue) or QueueScene(settings=QueueSettings(name=record.queue))
    return (
        _explain_pause(record, queue)
        or _explain_nodes(record, scene)
        or _explain_key(record, scene)
        or _explain_queue(record, queue)
        or _explain_head(record, queue, scene)
        or _explain_devices(record, scene)
        or _explain_places(record, scene)
        or _explain_full_places(record, scene)
        or _explain_rooms(record, scene)
        or _explain_lane(record, scene)
        or _explain_busy_places(record, scene)
        or Why(
            reason=Reason.TURN,
            text="nothing holds it: it starts when those before it have, of its queue and, by priority, of others",
            remedy="wait, or start it now",
            since=_ready_at(record),
        )
    )


def _ready_at(record: TaskRecord, at: datetime | None = None) -> datetime:
    """From when on something may have held it, or `at` if that is later."""
    ready = max(record.due_at, record.created_at)
    return ready if at is None else max(ready, at)


def _explain_hold(record: TaskRecord) -> Why:
    hold = record.hold
    text = "it is held" if hold is None else f"it is {describe_hold(hold)}"
    since = record.updated_at if hold is None else hold.at
    actor = "" if hold is None else hold.actor
    return Why(reason=Reason.HELD, text=text, remedy="release it, or cancel it", subject=actor, since=since)


def _explain_time(record: TaskRecord) -> Why:
    due, remedy = f"due at {_moment(record.due_at)}", "wait, start it now, or reschedule it"
    if record.state is TaskState.SCHEDULED:
        return Why(
            reason=Reason.SCHEDULED, text=f"it is {due}", remedy=remedy, since=record.created_at, until=record.due_at
        )
    error = record.error
    if error is not None and error.type == RETRY_LATER:
        text = f"run {record.attempt} asked to be tried again later; the next is {due}"
    else:
        with_what = "" if error is None else f" with {error.type}"
        text = f"run {record.attempt} failed{with_what}; the next is {due}"
    kind = "" if error is None else str(error.type)
    return Why(
        reason=Reason.BACKOFF, text=text, remedy=remedy, subject=kind, since=record.updated_at, until=record.due_at
    )


def _explain_dependency(record: TaskRecord, scene: Scene) -> Why:
    parent = scene.parents.get(record.uuid)
    others = f" and {record.open_dependencies - 1} more" if record.open_dependencies > 1 else ""
    if parent is None:
        # It has ended since the scene was read, or is just being told.
        text, blocker = "those that it waits for have ended, and it is about to be queued", None
    else:
        blocker, state = parent
        text = f"it waits for task {blocker}, which is {state}{',' if others else ''}{others}"
    return Why(
        reason=Reason.DEPENDENCY,
        text=text,
        remedy="wait until that has completed, or cancel this one",
        subject=blocker or "",
        since=record.created_at,
        blocker=blocker,
    )


def _explain_blocker(record: TaskRecord, scene: Scene) -> Why:
    """What the node that checked the task said."""
    blocker = record.blocker
    assert blocker is not None
    text, remedy = f"it waits for {blocker.label}", remedy_of(blocker.kind)
    able = [node for node in scene.nodes if record.consumer in node.consumers]
    if not able:
        remedy = f"start a worker whose app has the consumer {record.consumer!r}: only that checks it again"
    elif not any(node.has_check(blocker.kind) for node in able):
        check = "an admission check" if blocker.kind == BlockerKind.CHECK else f"a check for {blocker.kind}"
        text = f"{text}, and no running worker of {record.consumer!r} has {check}"
        # Without the check, what it requires of this kind has to be a label of a place.
        other = "cancel the task" if blocker.kind in record.requirements else "start the task now"
        remedy = f"start a worker whose app has {check}, or {other}"
    return Why(reason=Reason.BLOCKED, text=text, remedy=remedy, subject=blocker.key, since=blocker.since)


def _explain_lane(record: TaskRecord, scene: Scene) -> Why | None:
    """Others like it wait for something, and it would too: not each of them is checked."""
    blocker = scene.lane_blockers.get((record.queue, record.lane))
    able = [node for node in scene.nodes if record.consumer in node.consumers]
    if blocker is None or not any(node.has_check(blocker.kind) for node in able):
        return None
    text = f"others of {record.consumer!r} before it wait for {blocker.label}"
    since = _ready_at(record, blocker.since)
    return Why(reason=Reason.BLOCKED, text=text, remedy=remedy_of(blocker.kind), subject=blocker.key, since=since)


_STATES_SHOWN = (
    DeviceState.BUSY,
    DeviceState.DOWN,
    DeviceState.DRAINING,
    DeviceState.TAKEN,
    DeviceState.QUARANTINED,
)


def _explain_devices(record: TaskRecord, scene: Scene) -> Why | None:
    """In a pool its devices count, instead of the places of its consumer."""
    devices = scene.devices.get(record.queue)
    if not devices:
        return None
    checked = {kind for node in scene.nodes if record.consumer in node.consumers for kind in node.checks}
    requires = {name: value for name, value in record.requirements.items() if name not in checked}
    fitting = [device for device in devices if satisfies(device.spec.labels, requires)]
    subject = f"{record.queue}{_with_labels(record)}"
    if not fitting:
        labels = ", ".join(f"{name}={value}" for name, value in requires.items())
        return Why(
            reason=Reason.NO_DEVICE,
            text=f"no device has {labels}; the pool has {len(devices)} device{'s' * (len(devices) > 1)}",
            remedy="label a device, add one, or cancel the task",
            subject=subject,
            since=_ready_at(record),
        )
    by_state: dict[DeviceState, list[DeviceStatus]] = {}
    for device in fitting:
        by_state.setdefault(device.state_at(scene.now), []).append(device)
    if DeviceState.IDLE in by_state:
        return None
    counted = ", ".join(_count_devices(state, by_state[state]) for state in _STATES_SHOWN if state in by_state)
    busy = [device for device in by_state.get(DeviceState.BUSY, ()) if device.busy_since is not None]
    return Why(
        reason=Reason.DEVICES_BUSY,
        text=f"no idle device{_with_labels(record)}: {counted}",
        remedy=_free_device(by_state),
        subject=subject,
        since=_ready_at(record),
        blocker=min(busy, key=lambda device: device.busy_since or scene.now).task if busy else None,
    )


def _count_devices(state: DeviceState, devices: Sequence[DeviceStatus]) -> str:
    """`1 down since 12:03 (no answer)`: of those that are down, the one that has been so for longest."""
    text = f"{len(devices)} {state}"
    known = [(since, device.health.reason) for device in devices if (since := device.health.since) is not None]
    if state is not DeviceState.DOWN or not known:
        return text
    since, reason = min(known)
    return f"{text} since {_moment(since)}" + (f" ({reason})" if reason else "")


def _free_device(by_state: Mapping[DeviceState, Sequence[DeviceStatus]]) -> str:
    """What would make one of them idle."""
    ways = []
    if DeviceState.BUSY in by_state:
        ways.append("wait until a task has ended")
    if DeviceState.DOWN in by_state:
        ways.append(f"get {by_state[DeviceState.DOWN][0].name!r} to answer")
    apart = [one for state in _STATES_SHOWN[2:] for one in by_state.get(state, ())]
    if apart:
        ways.append(f"give {apart[0].name!r} back")
    return ", or ".join(ways)


def _explain_places(record: TaskRecord, scene: Scene) -> Why | None:
    if scene.devices.get(record.queue):
        return None
    able = [node for node in scene.nodes if record.consumer in node.consumers and node.takes_tasks]
    fitting = [node.count_places(record) for node in able]
    if any(n is None or n > 0 for n in fitting):
        return None
    what = f"no node has a place for {record.consumer!r}{_with_labels(record)}"
    return Why(
        reason=Reason.NO_PLACE,
        text=what,
        remedy="add such a place, or cancel the task",
        subject=f"{record.consumer}{_with_labels(record)}",
        since=_ready_at(record),
    )


def _explain_full_places(record: TaskRecord, scene: Scene) -> Why | None:
    """Each place of its consumer runs a task."""
    able = [node for node in scene.nodes if record.consumer in node.consumers and node.takes_tasks]
    are_full = all(record.consumer in node.places and node.is_full_of(record.consumer) for node in able)
    return _explain_busy_places(record, scene) if are_full else None


def _explain_busy_places(record: TaskRecord, scene: Scene) -> Why | None:
    """Nothing else holds it: then those that fit are taken, or not ready."""
    if scene.devices.get(record.queue):
        return None
    able = [node for node in scene.nodes if record.consumer in node.consumers and node.takes_tasks]
    fitting = sum(node.count_places(record) or 0 for node in able)
    if not fitting or any(node.count_places(record) is None for node in able):
        return None
    running = sum(busy.count for node in able if (busy := node.running.get(record.consumer)) is not None)
    if not running and not record.requirements:
        return None
    text = f"{fitting} of the places{_with_labels(record)} fit, and none is free"
    return Why(
        reason=Reason.PLACES_BUSY,
        text=text,
        remedy="wait, or add a place",
        subject=f"{record.consumer}{_with_labels(record)}",
        since=_ready_at(record),
    )


def _with_labels(record: TaskRecord) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in record.requirements.items())
    return f" with {labels}" if labels else ""


def _explain_pause(record: TaskRecord, queue: QueueScene) -> Why | None:
    control = queue.control
    if control.is_open:
        return None
    state = "is stopping" if control.state is QueueState.STOPPING else "is paused"
    text = f"queue {record.queue!r} {state}"
    if control.state_set is not None:
        why = f": {control.state_set.reason}" if control.state_set.reason else ""
        text += f" since {_moment(control.state_set.at)} by {control.state_set.actor}{why}"
    since = _ready_at(record, None if control.state_set is None else control.state_set.at)
    remedy = f"resume queue {record.queue!r}"
    return Why(reason=Reason.QUEUE_PAUSED, text=text, remedy=remedy, subject=record.queue, since=since)


def _explain_nodes(record: TaskRecord, scene: Scene) -> Why | None:
    able = [node for node in scene.nodes if record.consumer in node.consumers]
    if any(node.takes_tasks for node in able):
        return None
    if able:
        names = ", ".join(f"{node.label} {'is stopping' if node.is_stopping else 'is drained'}" for node in able[:3])
        text = f"all that serve {record.consumer!r} take nothing new: {names}"
        remedy = "start another worker, or take the draining back"
    else:
        others = f" ({len(scene.nodes)} serve other consumers)" if scene.nodes else ""
        text = f"no node that serves {record.consumer!r} is alive{others}"
        remedy = f"start a worker whose app has the consumer {record.consumer!r}"
    return Why(reason=Reason.NO_NODE, text=text, remedy=remedy, subject=record.consumer, since=_ready_at(record))


def _explain_key(record: TaskRecord, scene: Scene) -> Why | None:
    if not record.is_parked or record.key is None:
        return None
    holder = scene.holders.get((record.queue, record.key))
    since = _ready_at(record)
    if holder is None:
        text = f"another task with key {record.key!r} goes first"
    elif holder.state is TaskState.QUEUED:
        text = f"task {holder.uuid} with key {record.key!r} goes first"
    elif holder.state is TaskState.RETRYING:
        text = f"key {record.key!r} is kept for task {holder.uuid}, which will be tried again"
    else:
        text = f"key {record.key!r} is busy: task {holder.uuid} holds it"
        since = _ready_at(record, holder.started_at)
    return Why(
        reason=Reason.KEY_BUSY,
        text=text,
        remedy="wait until that has ended, or cancel it",
        subject=record.key,
        since=since,
        blocker=None if holder is None else holder.uuid,
    )


def _explain_head(record: TaskRecord, queue: QueueScene, scene: Scene) -> Why | None:
    line = line_of(record, queue.settings)
    head = None if line is None else scene.heads.get((record.queue, line))
    if head is None or head.uuid == record.uuid:
        return None
    where = f"queue {record.queue!r}" + (f", bucket {line!r}," if line else "")
    return Why(
        reason=Reason.HEAD_OF_LINE,
        text=f"{where} keeps to the order of arrival, and task {head.uuid}, which is {head.state}, stands first",
        remedy="ask why that one waits; move this one before it, or cancel it",
        subject=line or "",
        since=_ready_at(record, head.since),
        blocker=head.uuid,
    )


def _explain_queue(record: TaskRecord, queue: QueueScene) -> Why | None:
    limit, running = queue.concurrency, queue.running
    if limit is None or running is None or running.count < limit:
        return None
    return Why(
        reason=Reason.QUEUE_FULL,
        text=f"queue {record.queue!r} runs {running.count} of {limit} at once; task {running.uuid} has run longest",
        remedy="wait until one has ended, or raise the queue's concurrency",
        subject=record.queue,
        since=_ready_at(record, running.started_at),
        blocker=running.uuid,
    )


def _explain_rooms(record: TaskRecord, scene: Scene) -> Why | None:
    """Every node that could take it is full: of its source, of what runs where it would, or of anything."""
    source = record.consumer
    able = [node for node in scene.nodes if source in node.consumers and node.takes_tasks]
    by_source = [node.running[source] for node in able if node.is_full_of(source)]
    by_executor = [
        busy for node in able if not node.is_full_of(source) and (busy := node.fills_executor_of(source)) is not None
    ]
    others = [node for node in able if not node.is_full_of(source) and node.fills_executor_of(source) is None]
    if not all(node.is_full for node in others):
        return None
    if by_source:
        reason, more, subject = Reason.CONSUMER_FULL, "raise the consumer's concurrency", source
        text = f"{source!r} is at its limit of running tasks ({sum(busy.count for busy in by_source)} run)"
        longest = _longest(by_source)
    elif by_executor:
        reason, more = Reason.EXECUTOR_FULL, "give the executor more room (threads, or max_workers of the pool)"
        where = sorted({node.executors[source] for node in able if source in node.executors})
        subject = ", ".join(where)
        text = f"executor {', '.join(map(repr, where))}, where {source!r} runs, has no room (others may use it too)"
        longest = _longest(by_executor)
    else:
        reason, more, subject = Reason.NODES_FULL, "raise max_running", source
        text = f"every node that serves {source!r} runs as much as it may"
        longest = _longest([busy for node in able for busy in node.running.values()])
    return Why(
        reason=reason,
        text=f"{text}; task {longest.uuid} has run longest",
        remedy=f"wait until one has ended, {more}, or start another worker",
        subject=subject,
        since=_ready_at(record, longest.started_at),
        blocker=longest.uuid,
    )


def _longest(running: Sequence[Busy]) -> Busy:
    return min(running, key=lambda busy: busy.started_at)


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
