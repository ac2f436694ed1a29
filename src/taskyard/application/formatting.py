"""Durations, sizes and counts in few characters, for texts that people read."""

from __future__ import annotations

from datetime import datetime

from taskyard.model.durations import duration as duration  # noqa: PLC0414


def seconds_between(start: datetime | None, end: datetime | None) -> float | None:
    """Seconds on the wall clock, for showing only; 0 if the clock stepped back."""
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())


def counted(count: int, noun: str) -> str:
    """`1 task`, `3 tasks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size(count: float) -> str:
    """`512 B`, `3.4 MB`, `12 GB`."""
    for name in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {name}" if name == "B" or count >= 10 else f"{count:.1f} {name}"
        count /= 1000
    return f"{count:.1f} TB"


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= width else text[: max(0, width - 1)].rstrip() + "…"
