"""A ledger of what really happened, kept outside the store, and the checker that holds the store against it.

Tasks under test write when a run starts and ends, submitters when a submit was acknowledged, and whoever kills a
process writes before and after. The order of the lines is the order of events: an `acknowledged` is written after
`submit` returned, a `start` before the run does anything, an `end` after it has done everything, a `kill` before the
signal is sent, a `dead` after the process is gone.

A line is one write of 256 bytes at the end of the file, then a sync. The size divides that of a page: a process that is
killed inside that write leaves the whole line or none of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from taskyard.execution.context import RunContext
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import Attempt, TaskRecord
from taskyard.ports.store import Store

LINE = 256

DYING_S = 2.0
"""How long the lock of a run may outlast the verdict that its process is dead: the kernel frees the locks of a dead
process one after the other, the node's own among the first, and a busy machine may pause in between."""


class What(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    START = "start"
    END = "end"
    CLASH = "clash"
    """A run that starts found the lock of an earlier run of its task held by a live process."""
    KILL = "kill"
    DEAD = "dead"
    EXPIRED = "expired"
    """The tasks of a process are taken from it although it lives: what it runs is stale from here on."""
    STOP = "stop"
    """A process was asked to stop: from here on, runs may be given back."""


class Entry(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """One line. `at_mono` is the machine's monotonic clock, the same for all its processes; order never rests on it."""

    what: What
    task: str = ""
    attempt: int = 0
    token: int = 0
    pid: int = 0
    key: str | None = None
    note: str = ""
    at_mono: float = 0.0


class Ledger:
    """One file, any number of writers in any number of processes."""

    def __init__(self, path: str | Path, *, sync: bool = True, dying_s: float = DYING_S) -> None:
        self.path = Path(path)
        self._sync, self._dying_s = sync, dying_s
        flags = os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._locks = os.open(self.path.with_name(self.path.name + "-runs"), flags, 0o644)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._locks)

    # --- writing ------------------------------------------------------------------------------------------------------

    def acknowledged(self, uuid: str) -> None:
        self._write(Entry(what=What.ACKNOWLEDGED, task=uuid, pid=os.getpid()))

    @contextmanager
    def run(self, run: RunContext) -> Iterator[None]:
        """Around everything that a run does. The run holds a lock of its own meanwhile, which its death frees: so a
        second run of the task can tell a live first one from a dead one."""
        began = time.monotonic()
        if not self._take(run.uuid):
            self._of_run(What.CLASH, run)
        self._of_run(What.START, run, at_mono=began)
        note = "left"
        try:
            yield
            note = "done"
        except BaseException as exc:
            note = type(exc).__name__
            raise
        finally:
            self._of_run(What.END, run, note)
            self._lock(run.uuid, fcntl.F_UNLCK)

    def kill(self, pid: int, note: str = "") -> None:
        """Before the signal is sent."""
        self._write(Entry(what=What.KILL, pid=pid, note=note))

    def dead(self, pid: int) -> None:
        """After the process was waited for."""
        self._write(Entry(what=What.DEAD, pid=pid))

    def expired(self, pid: int) -> None:
        """Before its tasks are taken from it."""
        self._write(Entry(what=What.EXPIRED, pid=pid))

    def stop(self, pid: int) -> None:
        self._write(Entry(what=What.STOP, pid=pid))

    def _of_run(self, what: What, run: RunContext, note: str = "", at_mono: float = 0.0) -> None:
        entry = Entry(
            what=what,
            task=run.uuid,
            attempt=run.attempt,
            token=run.token,
            pid=os.getpid(),
            key=run.task.key,
            note=note[:40],
            at_mono=at_mono,
        )
        self._write(entry)

    def _write(self, entry: Entry) -> None:
        if not entry.at_mono:
            entry = msgspec.structs.replace(entry, at_mono=time.monotonic())
        line = msgspec.json.encode(entry).ljust(LINE - 1) + b"\n"
        if len(line) != LINE:
            raise ValueError(f"a ledger line holds {LINE} bytes, not {len(line)}: shorten the note or the key")
        if os.write(self._fd, line) != LINE:
            raise OSError(errno.ENOSPC, "the ledger took only part of a line", str(self.path))
        if self._sync:
            os.fdatasync(self._fd)

    # --- a lock a run -------------------------------------------------------------------------------------------------

    def _take(self, uuid: str) -> bool:
        until = time.monotonic() + self._dying_s
        while not self._lock(uuid, fcntl.F_WRLCK):
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def _lock(self, uuid: str, kind: int) -> bool:
        """Lock or free the one byte that stands for a task. The lock belongs to the open file, so to this process."""
        place = int(uuid.replace("-", ""), 16) % (1 << 62)
        flock = struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, flock)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    # --- reading ------------------------------------------------------------------------------------------------------

    def entries(self, after: int = 0) -> list[Entry]:
        """All lines but the first `after`."""
        with open(self.path, "rb") as file:
            file.seek(after * LINE)
            data = file.read()
        if len(data) % LINE:
            raise ValueError(f"{self.path} ends in a torn line: this ledger proves nothing")
        return [msgspec.json.decode(data[i : i + LINE], type=Entry) for i in range(0, len(data), LINE)]


# --- the checker ------------------------------------------------------------------------------------------------------


class Stored(msgspec.Struct, frozen=True):
    """What the store says of one task, in the end."""

    record: TaskRecord
    runs: list[Attempt]


async def read_store(store: Store) -> dict[str, Stored]:
    """Everything in the store, by uuid."""
    stored: dict[str, Stored] = {}
    before: int | None = None
    while page := await store.list_tasks(before_id=before, limit=500):
        for record in page:
            stored[record.uuid] = Stored(record, await store.list_attempts(record.uuid))
        before = page[-1].id
    return stored


def judge(entries: Iterable[Entry], stored: Mapping[str, Stored]) -> list[str]:
    """Everything that is wrong: nothing acknowledged may be lost, no two live runs of one task (or of one key) overlap,
    tokens strictly increase per task, every task ends, and the attempts recorded are the runs that were."""
    history = History()
    for entry in entries:
        history.follow(entry)
    return [*history.close(), *_compare(history, stored)]


@dataclass(slots=True)
class _Open:
    """A run that has started and not ended. The claim of one that is dying or stale may be somebody else's already."""

    entry: Entry
    is_dying: bool
    is_stale: bool = False


@dataclass(slots=True)
class History:
    """What the ledger alone can tell, line by line."""

    faults: list[str] = field(default_factory=list)
    acknowledged: set[str] = field(default_factory=set)
    starts: defaultdict[str, dict[int, Entry]] = field(default_factory=lambda: defaultdict(dict))
    ends: defaultdict[str, dict[int, Entry]] = field(default_factory=lambda: defaultdict(dict))
    has_stops: bool = False
    _open: dict[tuple[str, int], _Open] = field(default_factory=dict)
    _dying: set[int] = field(default_factory=set)
    # Tasks whose stale run has written its end, which is its last line, and may be about to free their lock.
    _letting_go: set[str] = field(default_factory=set)
    _line: int = 0

    def follow(self, entry: Entry) -> None:
        self._line += 1
        match entry.what:
            case What.ACKNOWLEDGED:
                self.acknowledged.add(entry.task)
            case What.START:
                self._start(entry)
            case What.END:
                self._end(entry)
            case What.CLASH:
                stale = {run.entry.task for run in self._open.values() if run.is_stale}
                if entry.task not in stale | self._letting_go:
                    self._blame(entry.task, f"token {entry.token} started while a live process held the task's lock")
            case What.KILL:
                self._dying.add(entry.pid)
                for run in self._open.values():
                    run.is_dying |= run.entry.pid == entry.pid
            case What.EXPIRED:
                for run in self._open.values():
                    run.is_stale |= run.entry.pid == entry.pid
            case What.DEAD:
                self._dying.discard(entry.pid)
                self._open = {at: run for at, run in self._open.items() if run.entry.pid != entry.pid}
            case What.STOP:
                self.has_stops = True

    def _start(self, entry: Entry) -> None:
        for run in self._open.values():
            if run.is_dying or run.is_stale:
                continue  # its process was being killed: that it was dead by now is what its lock shows
            other = run.entry
            if other.task == entry.task:
                self._blame(entry.task, f"token {entry.token} started while token {other.token} was running")
            elif entry.key is not None and other.key == entry.key:
                self._blame(entry.task, f"started while {other.task} was running under the same key {entry.key!r}")
        last = max(self.starts[entry.task], default=0)
        if entry.token <= last:
            self._blame(entry.task, f"token {entry.token} started after token {last}")
        self.starts[entry.task][entry.token] = entry
        self._letting_go.discard(entry.task)
        self._open[entry.task, entry.token] = _Open(entry, entry.pid in self._dying)

    def _end(self, entry: Entry) -> None:
        run = self._open.pop((entry.task, entry.token), None)
        if run is None:
            self._blame(entry.task, f"token {entry.token} ended without having started, or twice, or after its death")
        elif run.is_stale:
            self._letting_go.add(entry.task)
        self.ends[entry.task][entry.token] = entry

    def close(self) -> list[str]:
        for run in self._open.values():
            self._blame(run.entry.task, f"token {run.entry.token} started, and neither ended nor died")
        return self.faults

    def _blame(self, uuid: str, text: str) -> None:
        self.faults.append(f"task {uuid}: {text} (line {self._line})")


def _compare(history: History, stored: Mapping[str, Stored]) -> Iterator[str]:
    for uuid in sorted(history.acknowledged - stored.keys()):
        yield f"task {uuid}: acknowledged, and lost"
    for uuid in sorted(history.starts.keys() - stored.keys()):
        yield f"task {uuid}: was run, and is not in the store"
    tokens: dict[int, str] = {}
    for uuid, one in stored.items():
        yield from (f"task {uuid}: {text}" for text in _compare_task(history, uuid, one))
        for run in one.runs:
            if tokens.setdefault(run.token, uuid) != uuid:
                yield f"task {uuid}: token {run.token} was given to task {tokens[run.token]} as well"


def _compare_task(history: History, uuid: str, one: Stored) -> Iterator[str]:
    record, runs = one.record, one.runs
    if record.state not in ENDED:
        yield f"has not ended: {record.state}"
        return
    recorded = {run.token: run for run in runs}
    for token, start in history.starts[uuid].items():
        run = recorded.get(token)
        if run is None:
            yield f"the run with token {token} is not recorded"
        elif run.attempt != start.attempt:
            yield f"token {token} ran as attempt {start.attempt} and is recorded as attempt {run.attempt}"
    for run in runs:
        # What was claimed and died, or was stopped or canceled, before its first line left nothing in the ledger.
        ran = run.state in (TaskState.COMPLETED, TaskState.FAILED, TaskState.RETRYING)
        if ran and run.token not in history.ends[uuid]:
            yield f"the run with token {run.token} is recorded as {run.state}, and never ended"
    yield from _compare_attempts(record, runs, history.has_stops)


def _compare_attempts(record: TaskRecord, runs: list[Attempt], has_stops: bool) -> Iterator[str]:
    if any(run.state is TaskState.COMPLETED for run in runs[:-1]):
        yield "was run again after it had completed"
    if runs and record.state is TaskState.COMPLETED and runs[-1].state is not TaskState.COMPLETED:
        yield f"is completed, and its last run is recorded as {runs[-1].state}"
    if [run.token for run in runs] != sorted({run.token for run in runs}):
        yield "the tokens of its runs do not increase"
    expected = 1
    for run in runs:
        if run.attempt != expected and not (has_stops and run.attempt == expected - 1):
            yield f"attempt {run.attempt} is recorded where {expected} was due"
        expected = run.attempt + 1
    if runs and record.attempt != runs[-1].attempt and not (has_stops and record.attempt == runs[-1].attempt - 1):
        yield f"counts {record.attempt} attempts, and its last run was attempt {runs[-1].attempt}"
    elif not runs and record.attempt:
        yield f"counts {record.attempt} attempts, and no run is recorded"
