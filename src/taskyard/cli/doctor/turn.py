"""The turn to write: all who write wait for whoever has it, and one that is stopped inside of it holds up everybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from taskyard.cli.doctor.finding import Finding, problem
from taskyard.cli.locks import Holder, find_sqlite_writer, find_turn_holder
from taskyard.cli.text import clean, cut, duration

LOOKS, BETWEEN_S = 10, 0.1
"""The turn is looked at so often: whoever has it each time, without a commit in between, is stuck."""


def turn(path: Path, conn: apsw.Connection) -> Iterator[Finding]:
    for find, how in (
        (find_turn_holder, "has the turn to write"),
        (find_sqlite_writer, "is inside of a write transaction of SQLite's"),
    ):
        holder = _stuck(path, conn, find)
        if holder is not None:
            yield _held(holder, how)
            return
    yield Finding("turn to write", "free, or passed on quickly")


def _stuck(path: Path, conn: apsw.Connection, find: Callable[[Path], Holder | None]) -> Holder | None:
    """Who holds it at every look, while nothing is committed."""
    holder = find(path)
    version = conn.execute("PRAGMA data_version").get
    for _ in range(LOOKS):
        if holder is None or holder.is_stopped:
            return holder
        time.sleep(BETWEEN_S)
        again = find(path)
        if again is None or again.pid != holder.pid or conn.execute("PRAGMA data_version").get != version:
            return None
    return holder


def _held(holder: Holder, how: str) -> Finding:
    who = f"process {holder.pid} ({cut(clean(holder.command), 60)})"
    if holder.is_stopped:
        text = f"{who} {how} and is stopped; everybody waits for it"
        advice = f"let it go on with `kill -CONT {holder.pid}`, or end it with `kill -KILL {holder.pid}`"
    else:
        text = f"{who} {how}, for {duration(LOOKS * BETWEEN_S)} and longer, and has committed nothing"
        advice = f"find out what it does; if it hangs, end it with `kill {holder.pid}`"
    return problem("turn to write", text, advice, pid=holder.pid, stopped=holder.is_stopped)
