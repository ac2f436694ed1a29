"""Holds the history of a farm against what is promised of devices: a pure function, which says what is wrong.

The order is judged by the events of the store, which are its commits in order; what ran where, by the code of the tasks
itself; the truth of what the store says of a device, by what was done to that device.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from taskyard.model.device import DeviceState
from taskyard.model.event import EventKind
from taskyard.model.execution import ErrorCode
from taskyard.model.state import ENDED, LEGAL, TaskState
from taskyard.testing.clock import START
from taskyard.testing.simulation.farm_history import PERSON, Enqueued, Execution, FarmEnd, FarmHistory, Told

S = TaskState

ROUNDED_S = 1e-4
"""Times that are stored are cut to microseconds."""

NEVER = 1 << 62

NOTICE_S = 30.0
"""An outage that was over so long ago is no reason any more: two heartbeats and a call under way have ended by then."""


def judge_farm(history: FarmHistory, end: FarmEnd) -> list[str]:
    """Everything that is wrong."""
    return [
        *_check_moves(history, end),
        *_check_order(history, end),
        *_check_enqueued(history, end),
        *_check_answers(history, end),
        *_check_executions(history, end),
        *_check_alone(history, "account", lambda one: one.account),
        *_check_alone(history, "device", lambda one: one.device),
        *_check_losses(history, end),
        *_check_ends(end),
        *_check_devices(history, end),
    ]


def _task_events(history: FarmHistory, end: FarmEnd) -> Iterator[Told]:
    return (told for told in history.told if told.event.uuid and told.event.uuid in end.records)


# --- the store --------------------------------------------------------------------------------------------------------


def _check_moves(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """Every task moved along the table, so that none ran twice without having come back."""
    states: dict[str, TaskState] = {}
    for told in _task_events(history, end):
        event = told.event
        if event.after is None or event.before is event.after:
            continue
        old = states.get(event.uuid)
        if old is not None and event.after not in LEGAL[old]:
            yield f"task {event.uuid}: became {event.after} out of turn, was {old}"
        states[event.uuid] = event.after
    for uuid, record in end.records.items():
        if states.get(uuid) is not record.state:
            yield f"task {uuid}: is {record.state}, and its events say {states.get(uuid)}"


def _check_order(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """No task starts for the first time while one that stands before it in its bucket waits. Those that came back stand
    before all that have not started yet."""
    lines: defaultdict[str, _Line] = defaultdict(_Line)
    for told in _task_events(history, end):
        event = told.event
        if event.after is None or event.before is event.after:
            continue
        line = lines[(end.records[event.uuid].bucket or "") if end.is_bucketed else ""]
        if event.after is S.RUNNING:
            ahead = line.find_ahead(event.uuid)
            if ahead is not None:
                yield f"task {event.uuid}: started at {told.at_mono:.3f} s, and {ahead} stood before it"
        line.move(event.uuid, event.after)


class _Line:
    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._fresh: list[tuple[int, str]] = []
        self._waits: set[str] = set()
        self._returned: set[str] = set()
        self._started: set[str] = set()

    def find_ahead(self, uuid: str) -> str | None:
        if uuid in self._started:
            return None
        if self._returned:
            return min(self._returned)
        while self._fresh and self._fresh[0][1] not in self._waits:
            heapq.heappop(self._fresh)
        first = self._fresh[0][1] if self._fresh else uuid
        return None if first == uuid else first

    def move(self, uuid: str, state: TaskState) -> None:
        self._waits.discard(uuid)
        self._returned.discard(uuid)
        if state is S.RUNNING:
            self._started.add(uuid)
        elif state is S.QUEUED and uuid in self._started:
            self._returned.add(uuid)
        elif state is S.QUEUED:
            self._waits.add(uuid)
            heapq.heappush(self._fresh, (len(self._number), uuid))
            self._number[uuid] = len(self._number)


# --- what was enqueued ------------------------------------------------------------------------------------------------


def _check_enqueued(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """True means one stored task, False and a failure none; and it was stored while the call went on, so that the line
    has the order of those that enqueued one after the other."""
    stored = Counter(record.origin for record in end.records.values())
    added = {
        end.records[told.event.uuid].origin: told.at
        for told in _task_events(history, end)
        if told.event.kind is EventKind.SUBMITTED
    }
    for one in history.enqueued:
        count = stored[one.uuid]
        if one.answer is True and count != 1:
            yield f"enqueue {one.uuid}: was accepted, and {count} tasks of it are stored"
        elif (one.answer is False or one.is_never) and count:
            yield f"enqueue {one.uuid}: was refused, and a task of it is stored"
        elif count > 1:
            yield f"enqueue {one.uuid}: {count} tasks of it are stored"
        if one.answer is True and not one.asked < added.get(one.uuid, 0) < (one.answered or 0):
            yield f"enqueue {one.uuid}: was stored before it was asked for, or after it was answered"


def _check_answers(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """What is accepted had neither a task of its pair that had not ended, nor a task of its account that ran. What is
    refused met one of these, or a pair in quarantine, at some moment of the call."""
    pairs: defaultdict[tuple[str, str], _Spans] = defaultdict(_Spans)
    accounts: defaultdict[str, _Spans] = defaultdict(_Spans)
    for told in _task_events(history, end):
        event, record = told.event, end.records[told.event.uuid]
        if event.after is None or event.before is event.after:
            continue
        pair, account = pairs[record.key or "", record.consumer], accounts[record.key or ""]
        if event.kind is EventKind.SUBMITTED:
            if other := pair.now() or account.now():
                yield f"task {event.uuid}: was accepted while {other} of the same account waited or ran"
            pair.begin(event.uuid, told.at)
        if event.after is S.RUNNING:
            account.begin(event.uuid, told.at)
        else:
            account.end(event.uuid, told.at)
        if event.after in ENDED:
            pair.end(event.uuid, told.at)
    quarantined = _find_quarantined(history)
    for one in history.enqueued:
        pair_key = one.account, one.consumer
        met = (pairs[pair_key], accounts[one.account], quarantined[pair_key])
        if one.answer is False and not any(spans.meets(one) for spans in met):
            yield f"enqueue {one.uuid}: was refused, and nothing of account {one.account} waited or ran"


def _find_quarantined(history: FarmHistory) -> defaultdict[tuple[str, str], _Spans]:
    found: defaultdict[tuple[str, str], _Spans] = defaultdict(_Spans)
    for told in history.told:
        event = told.event
        if event.kind is EventKind.ACCOUNT_QUARANTINED:
            found[event.code, event.consumer].begin("", told.at)
        elif event.kind is EventKind.ACCOUNT_RELEASED:
            found[event.code, event.consumer].end("", told.at)
    return found


class _Spans:
    """When something held, between two places of the history, and of which task."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._closed: list[tuple[int, int]] = []

    def begin(self, uuid: str, at: int) -> None:
        self._open[uuid] = at

    def end(self, uuid: str, at: int) -> None:
        if uuid in self._open:
            self._closed.append((self._open.pop(uuid), at))

    def now(self) -> str | None:
        return next(iter(self._open), None)

    def meets(self, one: Enqueued) -> bool:
        until = one.answered or NEVER
        spans = [*self._closed, *((at, NEVER) for at in self._open.values())]
        return any(began < until and ended > one.asked for began, ended in spans)


# --- what ran ---------------------------------------------------------------------------------------------------------


def _check_executions(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """The code of an attempt runs once, of an attempt that the store knows, and on the device that the store says."""
    attempts = {attempt.token: (uuid, attempt) for uuid, some in end.attempts.items() for attempt in some}
    seen: set[int] = set()
    for one in history.executions:
        if one.token in seen:
            yield f"task {one.task}: token {one.token} ran twice"
        seen.add(one.token)
        uuid, attempt = attempts.get(one.token, ("", None))
        if uuid != one.task or attempt is None:
            yield f"task {one.task}: ran with the token {one.token}, of which the store knows nothing"
        elif attempt.device != one.device:
            yield f"task {one.task}: ran on {one.device}, and the store says {attempt.device}"


def _check_alone(history: FarmHistory, what: str, key_of: Callable[[Execution], str]) -> Iterator[str]:
    by_key: defaultdict[str, list[Execution]] = defaultdict(list)
    for one in history.executions:
        by_key[key_of(one)].append(one)
    for key, some in by_key.items():
        latest: list[Execution] = []
        for one in some:  # in the order in which they began
            latest = [other for other in latest if _over(history, other) > one.began]
            for other in latest:
                if not _is_left_behind(history, other, one.began):
                    yield (
                        f"{what} {key}: task {one.task} began at {one.began_mono:.3f} s on {one.device} of {one.node}, "
                        f"while {other.task} ran on {other.device} of {other.node} since {other.began_mono:.3f} s"
                    )
            latest.append(one)


def _over(history: FarmHistory, one: Execution) -> int:
    return min(NEVER if one.ended is None else one.ended, history.gone.get(one.node, NEVER))


def _is_left_behind(history: FarmHistory, one: Execution, at: int) -> bool:
    """Its code had been asked to stop and went on, and its node had left the store or was given up."""
    lost = min(history.expired.get(one.node, NEVER), history.left.get(one.node, NEVER))
    return one.told is not None and one.told < at and lost < at


def _check_losses(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """A task that has failed because its device was lost, or its node, was taken back as often as is allowed; and a
    device that is said to be lost had failed."""
    runs = {(one.task, one.token): one for one in history.executions}
    for uuid, record in end.records.items():
        if record.recoveries > end.auto_recover:
            yield f"task {uuid}: was taken back {record.recoveries} times, and {end.auto_recover} were allowed"
        for attempt in end.attempts[uuid]:
            if attempt.error is None or attempt.error.code is not ErrorCode.DEVICE_LOST:
                continue
            run = runs.get((uuid, attempt.token))
            ended_s = ((attempt.finished_at or end.now) - START).total_seconds()
            since_s = (0.0 if run is None else run.began_mono) - NOTICE_S
            device = attempt.device or ""
            if not _has_failed(history, device, since_s, ended_s) and attempt.node not in history.expired:
                yield f"task {uuid}: lost {device} at {ended_s:.3f} s, which worked"


def _has_failed(history: FarmHistory, device: str, since_s: float, until_s: float) -> bool:
    outages = history.outages.get(device, ())
    return any(one.from_mono <= until_s + ROUNDED_S and one.until_mono >= since_s for one in outages)


# --- the end ----------------------------------------------------------------------------------------------------------


def _check_ends(end: FarmEnd) -> Iterator[str]:
    for uuid, record in end.records.items():
        if record.state not in ENDED:
            yield f"task {uuid}: has not ended, is {record.state}"


def _check_devices(history: FarmHistory, end: FarmEnd) -> Iterator[str]:
    """All that work are idle; the others are down or quarantined, and say why. What has gone down had failed."""
    for status in end.devices:
        state = status.state_at(end.now)
        if status.name not in end.broken:
            if state is not DeviceState.IDLE:
                yield f"device {status.name}: is {state} ({status.health.reason}), and it works"
        elif state not in (DeviceState.DOWN, DeviceState.QUARANTINED):
            yield f"device {status.name}: is {state}, and it does not work"
        elif not status.health.reason and status.orders.quarantined is None:
            yield f"device {status.name}: is {state} and does not say why"
    for told in history.told:
        event, since_s = told.event, told.at_mono - NOTICE_S
        is_by_ladder = event.kind is EventKind.DEVICE_QUARANTINED and event.actor != PERSON
        if is_by_ladder and not _has_failed(history, event.device, since_s, told.at_mono):
            yield f"device {event.device}: was quarantined at {told.at_mono:.3f} s, and it worked"
