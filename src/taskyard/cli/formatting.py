"""How documents of tasks look in tables and live views: a symbol and a colour for each state, and shared phrases."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from taskyard.application.task_documents import TaskDocument, TaskError, WhyDocument
from taskyard.cli.text import as_short_json, clean, duration, moment, one_line, seconds_between, short_id
from taskyard.model.execution import ErrorKind, Progress
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.why import Reason

_S = TaskState

STATE_STYLES: dict[TaskState, tuple[str, str]] = {
    _S.CREATED: ("·", "dim"),
    _S.SCHEDULED: ("◷", "blue"),
    _S.QUEUED: ("○", "cyan"),
    _S.BLOCKED: ("■", "magenta"),
    _S.RUNNING: ("●", "bold bright_blue"),
    _S.RETRYING: ("↻", "yellow"),
    _S.PAUSED: ("‖", "magenta"),
    _S.COMPLETED: ("✔", "green"),
    _S.FAILED: ("✘", "bold red"),
    _S.CANCELED: ("⊘", "bright_black"),
    _S.SKIPPED: ("»", "bright_black"),
    _S.INTERRUPTED: ("!", "yellow"),
}
"""The symbol and the colour of each state."""

STATE_ORDER = (
    _S.RUNNING, _S.QUEUED, _S.SCHEDULED, _S.RETRYING, _S.BLOCKED, _S.PAUSED, _S.INTERRUPTED, _S.COMPLETED, _S.FAILED,
    _S.CANCELED, _S.SKIPPED,
)  # fmt: skip
"""The states in the order in which counts are shown."""

SHOWN_ELSEWHERE = frozenset({Reason.SCHEDULED, Reason.BACKOFF, Reason.TURN})
"""Reasons to wait that a list shows in its own way, or need not show."""


def state_symbol(state: TaskState) -> Text:
    return Text(*STATE_STYLES[state])


def state_text(state: TaskState) -> Text:
    symbol, style = STATE_STYLES[state]
    return Text(f"{symbol} {state}", style)


def counts_text(counts: Mapping[TaskState, int]) -> Text:
    """`● 4 running   ○ 12 queued   ✔ 120 completed`."""
    parts = [
        Text.assemble((f"{STATE_STYLES[state][0]} {counts[state]:,}", STATE_STYLES[state][1]), f" {state}")
        for state in STATE_ORDER
        if counts.get(state)
    ]
    return Text("   ").join(parts) if parts else Text("no tasks yet", "dim")


def progress_text(progress: Progress | None, width: int) -> str:
    """`62 % · 9.9 of 16 MB · 3.1/s`."""
    if progress is None:
        return ""
    parts = [
        "" if progress.fraction is None else f"{progress.fraction:.0%}".replace("%", " %"),
        progress.message,
        "" if progress.rate is None else rate_text(progress.rate),
        *(f"{name} {fact:,}" if type(fact) is int else f"{name} {fact}" for name, fact in progress.facts.items()),
    ]
    return one_line(" · ".join(filter(None, parts)), width)


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.1f}/s"


def summary_text(task: TaskDocument, now: datetime, width: int) -> Text:
    """One line about a task in this state: how far, when, with what result, why not."""
    style = ""
    match task.state:
        case _S.RUNNING:
            text = progress_text(task.progress, width)
            if task.cancel is not None:
                text = "cancel requested" + (f" · {text}" if text else "")
        case state if state in WAITING_FOR_TIME:
            error = "" if task.error is None else f" · {error_text(task.error)}"
            text = f"{due_text(task, now)}{error}"
        case _S.COMPLETED:
            text = "" if task.result is None else f"→ {as_short_json(task.result)}"
            style = "dim"
        case _:
            text = _final_error_text(task)
            style = "red" if task.state is _S.FAILED else "dim"
    text = " · ".join(filter(None, (text, task.remarks)))
    return Text(one_line(text, width), style)


def due_text(task: TaskDocument, now: datetime) -> str:
    verb = "again" if task.state is _S.RETRYING else "due"
    left = (task.due_at - now).total_seconds()
    if left > 86_400:
        return f"{verb} {moment(task.due_at)[:16]}"
    return f"{verb} in {duration(left)}" if left > 0 else f"{verb} now"


def error_text(error: TaskError) -> str:
    """`ValueError: …`; the message alone if the type says nothing new."""
    plain = error.kind is not ErrorKind.RUNTIME or error.type == "Cancel" or error.type in error.message
    return error.message if plain else f"{error.type}: {error.message}"


def _final_error_text(task: TaskDocument) -> str:
    error = task.error
    if error is None or (task.state is _S.CANCELED and error.kind is not ErrorKind.CANCELED):
        return ""  # a canceled task may keep the error of an earlier attempt
    return error_text(error)


def elapsed(task: TaskDocument, now: datetime) -> float | None:
    """How long the latest attempt has taken so far, or took; None if there is none."""
    return seconds_between(task.started_at, task.finished_at or now)


def why_line(why: WhyDocument | None) -> str | None:
    """Why a task waits, for a line in a list; None if the list says enough without it."""
    if why is None or why.reason in SHOWN_ELSEWHERE:
        return None
    other = why.blocking_task
    return clean(why.text if other is None else why.text.replace(other, short_id(other)))
