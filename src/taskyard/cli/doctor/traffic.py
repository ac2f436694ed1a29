"""Who is on the store and what is going on: nodes, the turn to write, tasks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import apsw

from taskyard.cli.doctor.finding import Finding, problem, warning
from taskyard.cli.documents import sum_states
from taskyard.cli.locks import Holder, find_sqlite_writer, find_turn_holder
from taskyard.cli.text import clean, cut, duration, seconds_between
from taskyard.ports.store import Node
from taskyard.stores.rows import from_us
from taskyard.stores.sqlite.reader import SqliteReader
from taskyard.stores.sqlite.sidecar import LockFile
from taskyard.stores.sqlite.store import boot_id

LOOKS, BETWEEN_S = 10, 0.1
"""The turn is looked at so often: whoever has it each time, without a commit in between, is stuck."""

CLOCK_S = 60.0
"""How far ahead of us the newest event may be."""


class Traffic:
    """What a reader of the store can see; it must be open."""

    def __init__(self, path: Path, conn: apsw.Connection) -> None:
        self._path, self._conn = path, conn
        self._reader = SqliteReader(conn)
        self._now = datetime.now(UTC)
        self.alive: list[Node] = []
        self.dead: list[Node] = []

    # --- nodes --------------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Finding]:
        for node, boot in self._reader.nodes():
            (self.alive if self._is_alive(node, boot) else self.dead).append(node)
        if not self.alive and not self.dead:
            yield Finding("workers", "none runs on this store", data={"alive": [], "dead": []})
            return
        for node in self.alive:
            yield Finding("worker", f"{self._describe(node)}, runs {', '.join(map(clean, node.sources)) or 'nothing'}")
        for node in self.dead:
            yield self._dead(node)

    def _is_alive(self, node: Node, boot: str) -> bool:
        """Its lock tells; where its file is gone, whether its process is there."""
        place = self._path.with_name(self._path.name + "-yard") / f"n-{node.incarnation}"
        try:
            file = LockFile(place, create=False)
        except OSError:
            return boot == boot_id() and os.path.exists(f"/proc/{node.pid}")
        try:
            return file.is_held_elsewhere()
        finally:
            file.close()

    def _describe(self, node: Node) -> str:
        since = duration(seconds_between(node.started_at, self._now))
        host = "" if node.host == socket.gethostname() else f" on {clean(node.host)}"
        return f"{clean(node.name)} (pid {node.pid}{host}), since {since or 'an unknown time'}"

    def _dead(self, node: Node) -> Finding:
        held = len(self._running_on(node.incarnation))
        text = f"{self._describe(node)}, is dead and held {held} {'task' if held == 1 else 'tasks'}"
        if self.alive:
            return warning("dead worker", text, "a living worker takes them back within a second or two; look again")
        advice = "start a worker: the first thing it does is to take them back"
        make = problem if held else warning
        return make("dead worker", text, advice, pid=node.pid, held=held)

    def _running_on(self, incarnation: str) -> list[str]:
        rows = self._conn.execute("SELECT uuid FROM task WHERE state = 'running' AND node = ?", (incarnation,))
        return [str(uuid) for (uuid,) in rows]

    # --- the turn to write --------------------------------------------------------------------------------------------

    def turn(self) -> Iterator[Finding]:
        """Everybody who writes waits for whoever has the turn; one that is stopped inside of it holds up all."""
        holder = self._stuck(find_turn_holder)
        if holder is not None:
            yield self._held(holder, "has the turn to write")
            return
        writer = self._stuck(find_sqlite_writer)
        if writer is not None:
            yield self._held(writer, "is inside of a write transaction of SQLite's")
            return
        yield Finding("turn to write", "free, or passed on quickly")

    def _stuck(self, find: Callable[[Path], Holder | None]) -> Holder | None:
        """Who holds it at every look, while nothing is committed."""
        holder = find(self._path)
        version = self._reader.data_version()
        for _ in range(LOOKS):
            if holder is None or holder.is_stopped:
                return holder
            time.sleep(BETWEEN_S)
            again = find(self._path)
            if again is None or again.pid != holder.pid or self._reader.data_version() != version:
                return None
        return holder

    def _held(self, holder: Holder, how: str) -> Finding:
        who = f"process {holder.pid} ({cut(clean(holder.command), 60)})"
        if holder.is_stopped:
            text = f"{who} {how} and is stopped; everybody waits for it"
            advice = f"let it go on with `kill -CONT {holder.pid}`, or end it with `kill -KILL {holder.pid}`"
        else:
            text = f"{who} {how}, for {duration(LOOKS * BETWEEN_S)} and longer, and has committed nothing"
            advice = f"find out what it does; if it hangs, end it with `kill {holder.pid}`"
        return problem("turn to write", text, advice, pid=holder.pid, stopped=holder.is_stopped)

    # --- tasks --------------------------------------------------------------------------------------------------------

    def tasks(self) -> Iterator[Finding]:
        counts = sum_states(self._reader.count())
        text = ", ".join(f"{n:,} {state}" for state, n in counts.items()) or "none yet"
        yield Finding("tasks", text, data={"counts": counts})
        yield from self._oldest_running()
        yield from self._unserved()
        yield from self._overdue()
        yield from self._clock()

    def _oldest_running(self) -> Iterator[Finding]:
        row = self._conn.execute(
            "SELECT uuid, source, started_at FROM task WHERE state = 'running' ORDER BY started_at LIMIT 1"
        ).fetchone()
        if row is not None:
            uuid, source, started_at = row
            since = seconds_between(from_us(int(started_at)), self._now)
            text = f"{clean(str(source))} {clean(str(uuid))}, for {duration(since)}"
            yield Finding("oldest running", text, data={"uuid": uuid, "running_s": since})

    def _unserved(self) -> Iterator[Finding]:
        """Tasks that wait for a consumer which no living worker has."""
        served = {source for node in self.alive for source in node.sources}
        rows = self._conn.execute("SELECT DISTINCT source FROM lane ORDER BY source").fetchall()
        for (source,) in rows:
            if source in served:
                continue
            waiting = self._conn.execute(
                "SELECT 1 FROM lane JOIN task ON task.queue = lane.queue AND task.source = lane.source "
                "WHERE lane.source = ? AND task.state = 'queued' AND task.parked = 0 LIMIT 1",
                (source,),
            ).fetchone()
            if waiting is not None:
                what = "no worker runs" if not self.alive else "no running worker has this consumer"
                advice = "start a worker whose app has it: taskyard worker module:yard"
                yield warning("unserved", f"tasks for {clean(str(source))!r} wait, and {what}", advice, source=source)

    def _overdue(self) -> Iterator[Finding]:
        """What is due is queued at once by any worker; if it is not, none is at work."""
        row = self._conn.execute("SELECT min(due_at) FROM task WHERE state IN ('scheduled', 'retrying')").fetchone()
        late = None if row is None or row[0] is None else (self._now - from_us(int(row[0]))).total_seconds()
        if late is not None and late > CLOCK_S:
            text = f"a task has been due for {duration(late)} and was not queued"
            yield warning("overdue", text, "start a worker" if not self.alive else "see whether its workers hang")

    def _clock(self) -> Iterator[Finding]:
        newest = self._conn.execute("SELECT max(updated_at) FROM task").get
        ahead = 0.0 if newest is None else (from_us(int(str(newest))) - self._now).total_seconds()
        if ahead > CLOCK_S:
            yield warning(
                "clock",
                f"the store's newest entry is {duration(ahead)} in the future",
                "a clock was or is wrong; check this machine's with `timedatectl`",
                ahead_s=ahead,
            )
