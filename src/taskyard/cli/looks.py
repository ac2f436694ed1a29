"""How states look, everywhere alike: a sign, a colour; and the few phrases that tables and live views share."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from taskyard.cli.documents import Revealed
from taskyard.cli.text import as_short_json, duration, moment, one_line, seconds_between
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.state import WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord

_S = TaskState

SIGNS: dict[TaskState, tuple[str, str]] = {
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

LIVE_ORDER = (
    _S.RUNNING, _S.QUEUED, _S.SCHEDULED, _S.RETRYING, _S.BLOCKED, _S.PAUSED, _S.INTERRUPTED, _S.COMPLETED, _S.FAILED,
    _S.CANCELED, _S.SKIPPED,
)  # fmt: skip


def sign(state: TaskState) -> Text:
    return Text(*SIGNS[state])


def state_text(state: TaskState) -> Text:
    symbol, style = SIGNS[state]
    return Text(f"{symbol} {state}", style)


def counts_text(counts: Mapping[TaskState, int]) -> Text:
    """`● 4 running   ○ 12 queued   ✔ 120 completed`."""
    parts = [
        Text.assemble((f"{SIGNS[state][0]} {counts[state]:,}", SIGNS[state][1]), f" {state}")
        for state in LIVE_ORDER
        if counts.get(state)
    ]
    return Text("   ").join(parts) if parts else Text("no tasks yet", "dim")


def progress_text(record: TaskRecord, shown: Revealed, width: int) -> str:
    """`62 % · 9.9 of 16 MB · 3.1/s`."""
    progress = record.progress
    if progress is None:
        return ""
    parts = [
        "" if progress.fraction is None else f"{progress.fraction:.0%}".replace("%", " %"),
        shown.text(progress.message),
        "" if progress.rate is None else rate_text(progress.rate),
        *(
            f"{name} {fact:,}" if type(fact) is int else f"{name} {shown.text(str(fact))}"
            for name, fact in progress.facts.items()
        ),
    ]
    return one_line(" · ".join(filter(None, parts)), width)


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.1f}/s"


def detail_text(record: TaskRecord, now: datetime, width: int) -> Text:
    """What one would want to know of a task in this state, in one line: how far, when, how it ended, why not."""
    shown = Revealed(record)
    style = ""
    match record.state:
        case _S.RUNNING:
            text = progress_text(record, shown, width)
            if record.cancel is not None:
                text = "cancel requested" + (f" · {text}" if text else "")
        case state if state in WAITING_FOR_TIME:
            text = f"{due_text(record, now)}{_because(record, shown)}"
        case _S.COMPLETED:
            text = "" if shown.result is None else f"→ {as_short_json(shown.result)}"
            style = "dim"
        case _:
            text = _why(record, shown)
            style = "red" if record.state is _S.FAILED else "dim"
    text = " · ".join(filter(None, (text, shown.text(record.remarks))))
    return Text(one_line(text, width), style)


def due_text(record: TaskRecord, now: datetime) -> str:
    verb = "again" if record.state is _S.RETRYING else "due"
    left = (record.due_at - now).total_seconds()
    if left > 86_400:
        return f"{verb} {moment(record.due_at)[:16]}"
    return f"{verb} in {duration(left)}" if left > 0 else f"{verb} now"


def _because(record: TaskRecord, shown: Revealed) -> str:
    return "" if record.error is None else f" · {shown.text(error_line(record.error))}"


def error_line(error: ExecutionError) -> str:
    """`ValueError: …`; where the type says nothing new, the message alone."""
    plain = error.kind is not ErrorKind.RUNTIME or error.type == "Cancel" or error.type in error.text
    return error.text if plain else f"{error.type}: {error.text}"


def _why(record: TaskRecord, shown: Revealed) -> str:
    error = record.error
    if error is None or (record.state is _S.CANCELED and error.kind is not ErrorKind.CANCELED):
        return ""  # a canceled task may keep the error of an earlier attempt
    return shown.text(error_line(error))


def elapsed(record: TaskRecord, now: datetime) -> float | None:
    """How long the run has taken, or took; None for what has not run."""
    return seconds_between(record.started_at, record.finished_at or now)
