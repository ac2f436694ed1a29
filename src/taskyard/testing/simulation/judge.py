"""Holds a history against what is promised: a pure function, which says what is wrong.

What the ledger's checker knows (nothing acknowledged is lost, no two live runs of one task or key, tokens increase,
every task ends, attempts are recorded) it says; here is what needs the whole history, or the rules of queues.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from taskyard.model.event import EventKind
from taskyard.model.state import ENDED, LEGAL, TaskState
from taskyard.model.task import Dedupe, TaskRecord
from taskyard.testing.clock import START
from taskyard.testing.ledger import Stored, judge
from taskyard.testing.simulation.history import End, Fate, History, Kind, Op, Start
from taskyard.testing.simulation.linear import View, explain, seen

STATES = {str(state): state for state in TaskState}


def judge_history(history: History, end: End) -> list[str]:
    """Everything that is wrong."""
    return [
        *history.faults,
        *judge(history.entries, end.stored),
        *_check_linear(history, end),
        *_check_batches(history, end),
        *_check_limits(history, end),
        *_check_due(history, end),
        *_check_retries(history, end),
        *_check_results(end),
        *_check_children(history, end),
        *_check_events(history, end),
        *_check_counts(end),
    ]


# --- per task, every answer can be explained --------------------------------------------------------------------------


def _check_linear(history: History, end: End) -> Iterator[str]:
    by_task: defaultdict[str, list[Op]] = defaultdict(list)
    unheard: defaultdict[str, list[Op]] = defaultdict(list)
    for op in history.ops:
        if op.kind is Kind.RESCUE and not op.task:
            unheard[op.node].append(op)
        else:
            by_task[op.task].append(op)
    for uuid in sorted(by_task.keys() | end.stored.keys()):
        one = end.stored.get(uuid)
        ops = [_as_told(op) for op in by_task[uuid]] + _unheard(history, by_task[uuid], one, unheard)
        submitted = history.submitted.get(uuid)
        queue = "" if submitted is None else submitted.record.queue
        auto_recover = end.queues[queue].auto_recover if queue in end.queues else 1
        if not explain(ops, _last(one), auto_recover=auto_recover):
            yield f"task {uuid}: no order of what was asked explains what was answered"


def _as_told(op: Op) -> Op:
    """A failure may be told late, of a task that was sent again meanwhile."""
    is_failure = op.kind is Kind.ENDED and op.found is TaskState.FAILED
    return msgspec.structs.replace(op, asked=0) if is_failure else op


def _last(one: Stored | None) -> View | None:
    if one is None:
        return None
    record = one.record
    return View(
        seen(record.state) or record.state,
        record.token or 0,
        record.node or "",
        record.attempt,
        record.recoveries,
        record.state is TaskState.RUNNING and record.cancel is not None,
    )


def _unheard(history: History, ops: list[Op], one: Stored | None, rescues: dict[str, list[Op]]) -> list[Op]:
    """What the node that asked never heard of, and other things show: claims that were found again, or that died with
    their node; rescues whose answer was lost."""
    if one is None:
        return []
    heard = {op.token for op in ops if op.kind is Kind.CLAIM}
    found: list[Op] = []
    for run in one.runs:
        if run.token not in heard:
            start = history.starts.get(run.token)
            claim = Op(kind=Kind.CLAIM, task=one.record.uuid, asked=0, node=run.node, token=run.token)
            claim.attempt, claim.fate, claim.is_certain = run.attempt, Fate.DONE, True
            claim.answered = None if start is None else start.at
            found.append(claim)
        if run.state is TaskState.INTERRUPTED:
            found += [op for op in rescues.get(run.node, ()) if op not in found]
    return found


def _check_batches(history: History, end: End) -> Iterator[str]:
    """Tasks submitted together are all there, or none is; what was merged away is not there."""
    merged = {op.task for op in history.ops if op.kind is Kind.SUBMIT and op.fate is Fate.NEVER}
    batches: defaultdict[int, list[str]] = defaultdict(list)
    for uuid, submitted in history.submitted.items():
        if uuid not in merged and submitted.dedupe is Dedupe.ALLOW:
            batches[submitted.batch].append(uuid)
    for uuids in batches.values():
        there = [uuid for uuid in uuids if uuid in end.stored]
        if there and len(there) < len(uuids):
            yield f"task {uuids[0]}: of a batch of {len(uuids)} there are {len(there)}"


# --- limits -----------------------------------------------------------------------------------------------------------


def _check_limits(history: History, end: End) -> Iterator[str]:
    """Of what runs on nodes that were not given up, no more at once than queue, key and node allow."""
    never = 1 << 62
    runs = [
        (start, min(history.ends.get(token, never), history.gone.get(start.node, never)))
        for token, start in history.starts.items()
    ]
    live = [(start, over, history.expired.get(start.node, never)) for start, over in runs]
    for start, _, expired in live:
        if start.at > expired:
            continue  # stale from its beginning
        record = _asked(history, start.task)
        if record is None:
            continue
        beside = [
            (other, asked)
            for other, over, gone in live
            if other.at <= start.at < min(over, gone) and (asked := _asked(history, other.task)) is not None
        ]
        yield from (f"task {start.task}: {fault}" for fault in _crowded(start.node, record, beside, end))


def _crowded(node: str, record: TaskRecord, beside: list[tuple[Start, TaskRecord]], end: End) -> Iterator[str]:
    rules = end.queues[record.queue]
    in_queue = sum(other.queue == record.queue for _, other in beside)
    if rules.concurrency is not None and in_queue > rules.concurrency:
        yield f"is one of {in_queue} that run in queue {record.queue!r}, which has room for {rules.concurrency}"
    with_key = sum((other.queue, other.key) == (record.queue, record.key) for _, other in beside)
    if record.key is not None and with_key > rules.per_key:
        yield f"is one of {with_key} that run with key {record.key!r}, of which {rules.per_key} may"
    here = sum(start.node == node and other.consumer == record.consumer for start, other in beside)
    if here > end.room[record.consumer]:
        yield f"is one of {here} runs of {record.consumer!r} on {node}, which has room for {end.room[record.consumer]}"


def _asked(history: History, uuid: str) -> TaskRecord | None:
    submitted = history.submitted.get(uuid)
    return None if submitted is None else submitted.record


# --- time, retries, results -------------------------------------------------------------------------------------------


def _check_due(history: History, end: End) -> Iterator[str]:
    """Nothing starts before the store's clock has shown its time at least once since that was set."""
    settles = {op.token: op for op in history.ops if op.kind is Kind.SETTLE}
    for uuid, one in end.stored.items():
        submitted = history.submitted.get(uuid)
        if submitted is None:
            continue
        due, since_mono = submitted.record.due_at, submitted.at_mono
        for run in one.runs:
            start = history.starts.get(run.token)
            if start is not None and _peak(history, since_mono, start.at_mono) < (due - START).total_seconds() - 1e-5:
                yield f"task {uuid}: token {run.token} started before its time"
            settle = settles.get(run.token)
            if run.state is TaskState.RETRYING and settle is not None and settle.due_at is not None:
                first = min(op.asked_mono for op in history.ops if op.kind is Kind.SETTLE and op.token == run.token)
                due, since_mono = settle.due_at, first


def _peak(history: History, since_mono: float, until_mono: float) -> float:
    """The latest time that the store's clock has shown in between, in seconds since the start of the simulation."""
    peak = float("-inf")
    ends = [*(at for at, _ in history.steps[1:]), float("inf")]
    for (began, ahead_s), ended in zip(history.steps, ends, strict=True):
        if began <= until_mono and ended >= since_mono:
            peak = max(peak, min(ended, until_mono) + ahead_s)
    return peak


def _check_retries(history: History, end: End) -> Iterator[str]:
    retried = {op.token for op in history.ops if op.kind is Kind.SETTLE and op.retried}
    again = Counter(op.task for op in history.ops if op.kind is Kind.RETRY and op.fate in (Fate.DONE, Fate.UNKNOWN))
    for uuid, one in end.stored.items():
        most = end.max_retries if one.record.retry is None else one.record.retry.max_retries
        used = sum(run.state is TaskState.RETRYING and run.token in retried for run in one.runs)
        if one.record.retries > most or used > most * (1 + again[uuid]):
            yield f"task {uuid}: was retried {used} times, and {most} were allowed"


def _check_results(end: End) -> Iterator[str]:
    """The result is that of the run that completed the task: its token."""
    for uuid, one in end.stored.items():
        if one.record.state is TaskState.COMPLETED and one.runs and one.record.result != str(one.runs[-1].token):
            yield f"task {uuid}: has the result of token {one.record.result}, and token {one.runs[-1].token} ended it"


def _check_children(history: History, end: End) -> Iterator[str]:
    """A run whose node was given up submits nothing any more."""
    for uuid, submitted in history.submitted.items():
        if submitted.parent is None or uuid not in end.stored:
            continue
        node, token = submitted.parent
        if submitted.at > history.expired.get(node, submitted.at):
            yield f"task {uuid}: submitted by the stale run {token} of {node}"


# --- what the store says of itself ------------------------------------------------------------------------------------


def _check_events(history: History, end: End) -> Iterator[str]:
    """Every task moved along the table, and of those that stand for the same work one at a time was pending."""
    states: dict[str, set[TaskState]] = {}
    pending: dict[str, str] = {}
    for event in end.events:
        submitted = history.submitted.get(event.uuid)
        slot = submitted.record.dedupe_slot if submitted is not None and submitted.dedupe is not Dedupe.ALLOW else None
        if event.kind is EventKind.SUBMITTED:
            states[event.uuid] = {TaskState.QUEUED, TaskState.SCHEDULED}
            if slot is not None and pending.setdefault(slot, event.uuid) != event.uuid:
                yield f"task {event.uuid}: was added while {pending[slot]} stood for the same work"
        elif (state := STATES.get(event.kind)) is not None:
            if not any(state in LEGAL[old] for old in states.get(event.uuid, ())):
                yield f"task {event.uuid}: became {state} out of turn"
            is_again = slot is not None and states.get(event.uuid) == {TaskState.FAILED}
            if slot is not None and is_again and pending.setdefault(slot, event.uuid) != event.uuid:
                yield f"task {event.uuid}: was sent again while {pending[slot]} stood for the same work"
            states[event.uuid] = {state}
            if slot is not None and state in ENDED and pending.get(slot) == event.uuid:
                del pending[slot]


def _check_counts(end: End) -> Iterator[str]:
    counted = Counter((one.record.queue, one.record.state) for one in end.stored.values())
    if dict(counted) != {key: count for key, count in end.counts.items() if count}:
        yield f"the tally says {end.counts}, the tasks are {dict(counted)}"
