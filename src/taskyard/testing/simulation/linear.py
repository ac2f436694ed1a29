"""Whether what was answered about one task can be explained: is there an order of all that was asked of it, each op
somewhere between its question and its answer, in which every answer is right?

The model is a task as its users see it, apart from the code under test. What waits for a time and what waits for a
place are one state here: when a task becomes due is checked elsewhere. An op without an answer may have happened, or
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskyard.model.state import ENDED, TaskState
from taskyard.testing.simulation.history import Fate, Kind, Op

S = TaskState
WAITS = S.QUEUED

NEVER = 1 << 62
"""The place of an answer that never came."""

MANY = 50_000
"""Ways that are tried for one task, before it counts as unexplained."""


FITS = {Kind.CANCEL: {WAITS, S.RUNNING}, Kind.RETRY: {S.FAILED}, Kind.PRIORITY: {WAITS}}
"""Where a command is never refused. Nor is anything else, if there is a task at all."""


class View(NamedTuple):
    """A task at one moment."""

    state: TaskState
    token: int = 0
    node: str = ""
    attempt: int = 0
    recoveries: int = 0
    is_cancel_asked: bool = False


WRONG = View(TaskState.CREATED)
"""Where no task ever is."""


def seen(state: TaskState | None) -> TaskState | None:
    """As this model tells states apart."""
    return WAITS if state in (S.SCHEDULED, S.RETRYING) else state


def explain(ops: Sequence[Op], last: View | None, *, auto_recover: int) -> bool:
    """Whether some order of `ops` leads from no task to `last` and fits every answer."""
    ops = [op for op in ops if op.fate is not Fate.NEVER]
    ends = [op.answered or NEVER for op in ops]
    needed = sum(1 << i for i, op in enumerate(ops) if op.answered is not None or op.is_certain)
    stack: list[tuple[int, View | None]] = [(0, None)]
    tried = set(stack)
    while stack:
        if len(tried) > MANY:
            return False
        done, view = stack.pop()
        if done & needed == needed and _is_last(view, last):
            return True
        first_end = min((end for i, end in enumerate(ends) if not done >> i & 1), default=NEVER)
        for i in range(len(ops) - 1, -1, -1):
            if done >> i & 1 or ops[i].asked > first_end:
                continue
            after = step(view, ops[i], auto_recover)
            way = (done | 1 << i, after)
            if after is not WRONG and way not in tried:
                tried.add(way)
                stack.append(way)
    return False


def _is_last(view: View | None, last: View | None) -> bool:
    if view is None or last is None:
        return view is last
    return view[:1] + view[3:5] == last[:1] + last[3:5]


def step(view: View | None, op: Op, auto_recover: int) -> View | None:
    """The task after `op`, or `WRONG` if the op cannot have been answered so here."""
    if op.kind is Kind.SUBMIT:
        return View(WAITS) if view is None else WRONG
    if view is None or op.fate in (Fate.REFUSED, Fate.TAKEN):
        return _refused(view, op)
    match op.kind:
        case Kind.CLAIM:
            if view.state is not WAITS or op.attempt != view.attempt + 1:
                return WRONG
            return View(S.RUNNING, op.token, op.node, op.attempt, view.recoveries)
        case Kind.SETTLE:
            return _settle(view, op)
        case Kind.RESCUE:
            return _rescue(view, op, auto_recover)
        case Kind.CANCEL:
            return _cancel(view, op)
        case Kind.RETRY:
            return View(WAITS, attempt=view.attempt) if view.state is S.FAILED else WRONG
        case Kind.PRIORITY:
            return view if view.state is WAITS else WRONG
        case Kind.PENDING:
            return view if view.state not in ENDED else WRONG
        case Kind.ENDED:
            return view if view.state is op.found else WRONG


def _refused(view: View | None, op: Op) -> View | None:
    """What was found must have been so, and a reason to refuse."""
    if op.fate is Fate.UNKNOWN and op.kind in (Kind.CANCEL, Kind.RETRY, Kind.PRIORITY):
        return view  # asked of a task that was not there yet
    if op.fate is Fate.TAKEN:
        return view if view is not None and view.state is S.FAILED else WRONG
    if op.fate is not Fate.REFUSED:
        return WRONG
    if op.kind is Kind.SETTLE:
        return WRONG if view is not None and (view.state, view.token) == (S.RUNNING, op.token) else view
    if (None if view is None else view.state) is not seen(op.found):
        return WRONG
    return WRONG if view is not None and view.state in FITS.get(op.kind, TaskState) else view


def _settle(view: View, op: Op) -> View:
    if (view.state, view.token) != (S.RUNNING, op.token):
        # Without an answer it may have come too late, which changed nothing.
        return view if op.fate is Fate.UNKNOWN else WRONG
    assert op.state is not None
    state = seen(op.state)
    if state is WAITS and view.is_cancel_asked:
        return View(S.CANCELED, attempt=view.attempt, recoveries=view.recoveries)
    attempt = view.attempt - (op.state is S.QUEUED)  # given back: it has not counted
    return View(state or op.state, attempt=attempt, recoveries=view.recoveries)


def _rescue(view: View, op: Op, auto_recover: int) -> View:
    if (view.state, view.node) != (S.RUNNING, op.node):
        return view if op.fate is Fate.UNKNOWN else WRONG
    if view.is_cancel_asked:
        return View(S.CANCELED, attempt=view.attempt, recoveries=view.recoveries)
    if view.recoveries < auto_recover:
        return View(WAITS, attempt=view.attempt, recoveries=view.recoveries + 1)
    return View(S.FAILED, attempt=view.attempt, recoveries=view.recoveries)


def _cancel(view: View, op: Op) -> View:
    is_known = op.fate is Fate.DONE
    if view.state is S.RUNNING:
        return view._replace(is_cancel_asked=True) if not is_known or op.found is S.RUNNING else WRONG
    if view.state is WAITS:
        canceled = View(S.CANCELED, attempt=view.attempt, recoveries=view.recoveries)
        return canceled if not is_known or op.found is S.CANCELED else WRONG
    return WRONG if is_known else view
