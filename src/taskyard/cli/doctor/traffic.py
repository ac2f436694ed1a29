"""Who is on the store and what is going on: workers alive and dead, tasks, clocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import apsw

from taskyard.cli.doctor.finding import Finding, problem, warning
from taskyard.cli.doctor.work import Work, work
from taskyard.cli.documents import sum_states
from taskyard.cli.locks import find_node_holder, node_file
from taskyard.cli.text import clean, counted, duration, seconds_between
from taskyard.model.node import Node
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.stores.records import from_us
from taskyard.stores.sqlite.reader import SqliteReader
from taskyard.stores.sqlite.schedules import read_schedules
from taskyard.stores.sqlite.sidecar import LockFile
from taskyard.stores.sqlite.store import boot_id

RUNNING_AT_MOST = 10_000


class Traffic:
    """What a reader of the store can see; it must be open."""

    def __init__(self, path: Path, conn: apsw.Connection) -> None:
        self._path, self._conn = path, conn
        self._reader = SqliteReader(conn)
        self._now = datetime.now(UTC)
        self._running = self._reader.list_tasks(TaskFilter(states=(TaskState.RUNNING,)), None, RUNNING_AT_MOST)
        self.alive: list[Node] = []
        self.dead: list[Node] = []

    # --- nodes --------------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Finding]:
        for status, boot in self._reader.nodes():
            (self.alive if self._is_alive(status.node, boot) else self.dead).append(status.node)
        if not self.alive and not self.dead:
            yield Finding("workers", "none runs on this store", data={"alive": [], "dead": []})
            return
        for node in self.alive:
            yield self._alive(node)
        for node in self.dead:
            yield self._dead(node)

    def _is_alive(self, node: Node, boot: str) -> bool:
        """Its lock tells; where its file is gone, whether its process is there."""
        try:
            file = LockFile(node_file(self._path, node.incarnation), create=False)
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

    def _alive(self, node: Node) -> Finding:
        holder = find_node_holder(self._path, node.incarnation)
        if not node_file(self._path, node.incarnation).exists():
            text = f"{self._describe(node)}, lives, but its file beside the store was removed: others cannot wake it"
            return warning("worker", text, "start it again, which makes the file anew; no task is lost", pid=node.pid)
        if holder is None or not holder.is_stopped:
            sources = ", ".join(map(clean, node.consumers)) or "nothing"
            return Finding("worker", f"{self._describe(node)}, runs {sources}")
        held = self._held(node)
        grip = f"holds {counted(held, 'task')}, which nobody else may run" if held else "takes no tasks"
        text = f"{self._describe(node)}, is stopped and {grip}"
        advice = f"let it go on with `kill -CONT {holder.pid}`; or end it with `kill -KILL {holder.pid}`"
        make = problem if held else warning
        return make("stopped worker", text, f"{advice}, and others take over", pid=holder.pid, held=held)

    def _held(self, node: Node) -> int:
        return sum(task.node == node.incarnation for task in self._running)

    def _dead(self, node: Node) -> Finding:
        held = self._held(node)
        text = f"{self._describe(node)}, is dead and held {counted(held, 'task')}"
        if self.alive:
            return warning("dead worker", text, "a living worker takes them back within a second or two; look again")
        advice = "start a worker: the first thing it does is to take them back"
        make = problem if held else warning
        return make("dead worker", text, advice, pid=node.pid, held=held)

    # --- tasks --------------------------------------------------------------------------------------------------------

    def tasks(self) -> Iterator[Finding]:
        rows = self._conn.execute(
            "SELECT DISTINCT consumer FROM task WHERE state = 'queued' AND is_parked = 0"
        ).fetchall()
        due = self._conn.execute("SELECT min(due_at) FROM task WHERE state IN ('scheduled', 'retrying')").get
        newest = self._conn.execute("SELECT max(updated_at) FROM task").get
        yield from work(
            Work(
                counts=sum_states(self._reader.count()),
                running=self._running,
                waiting=[str(source) for (source,) in rows],
                workers=self.alive,
                due_at=None if due is None else from_us(int(str(due))),
                newest_at=None if newest is None else from_us(int(str(newest))),
                now=self._now,
                schedules=read_schedules(self._conn),
            )
        )
