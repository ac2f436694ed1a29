"""A turn on its way to the database and back: arrays for what is many, JSON for what is rare."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import Any

import asyncpg
import msgspec

from taskyard.errors import (
    AccountQuarantined,
    ClaimLost,
    DependencyCycle,
    DuplicateTask,
    InvalidInput,
    SubmitPending,
    TaskyardError,
    UnknownTask,
)
from taskyard.model.dependency import find_cycle
from taskyard.model.device import read_account
from taskyard.model.limits import Demand
from taskyard.model.move import Move, event_detail
from taskyard.model.settle import heed_cancel
from taskyard.model.state import COMPLETED, RUNNING, TaskState, check_move
from taskyard.model.task import Claim, Dedupe, DedupeScope, OnFailure, TaskRecord
from taskyard.ports.store import Add, Added, News, Report, Turned
from taskyard.stores.plan import window_end
from taskyard.stores.postgres.constants import SEPARATOR
from taskyard.stores.postgres.rows import clean, clean_all, encode_demand, find_unstorable, tie, to_claims, to_text
from taskyard.stores.records import NEW_TASK_FIELDS, POSTGRES, TASK, has_relations

CALL = (
    "CALL taskyard.exchange_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, "
    "NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
)

_to_new_row = TASK.writer(POSTGRES, NEW_TASK_FIELDS)

_SENT_APART = ("uuid", "args")
"""Sent as one text each: an array of so many texts would take the client five times as long."""

HEEDS_CANCEL = frozenset({TaskState.CANCELED, TaskState.QUEUED, TaskState.RETRYING})

Columns = tuple[list[Any] | bool | None, ...]


class Turn:
    """One turn: `arguments` for `CALL`, then `answer` from its row. An add that can never be stored is `refused`."""

    def __init__(
        self,
        node: str,
        now: datetime,
        settles: Sequence[tuple[Claim, Move]],
        adds: Sequence[Add],
        reports: Sequence[Report],
        demand: Demand | None,
    ) -> None:
        for state in {move.state for _, move in settles}:
            check_move(RUNNING, state)  # before anything is sent: a turn happens as a whole or not
        self._node, self._now, self._demand = node, now, demand
        self._settles, self._adds, self._reports = settles, adds, reports
        self._refused: dict[int, TaskyardError] = {}
        self.is_careful = any(
            add.parent is not None or add.dedupe is not Dedupe.ALLOW or add.after or any(map(_is_special, add.records))
            for add in adds
        )
        """Whether each add is looked at by itself; otherwise all are stored in one go."""

    def news(self) -> News:
        """What others are told of it, as far as is known before it is taken. What it promotes is new to them too."""
        return News.ADDED if not self._settles and not self._reports and not self.is_careful else News.CHANGED

    def refuse_unstorable(self) -> bool:
        """Leave out the adds that can never be stored; whether there are any."""
        before = len(self._refused)
        for n, add in enumerate(self._adds):
            for record in add.records:
                if n not in self._refused and (why := find_unstorable(record)) is not None:
                    self._refused[n] = InvalidInput(f"task {record.uuid} cannot be stored: {why}")
            for parent in chain.from_iterable(add.after.values()):
                if n not in self._refused and clean(parent) != parent:
                    self._refused[n] = UnknownTask(parent)
        return len(self._refused) > before

    def claim_less(self) -> bool:
        """Ask for an eighth; whether that is fewer. What is claimed has to fit into a gigabyte, and be sent in time."""
        demand = self._demand
        if demand is None or demand.total <= 1:
            return False
        self._demand = msgspec.structs.replace(demand, total=max(1, demand.total // 8))
        return True

    @property
    def has_adds(self) -> bool:
        return len(self._adds) > len(self._refused)

    def _stored(self) -> list[Add]:
        return [add for n, add in enumerate(self._adds) if n not in self._refused]

    def _records(self) -> list[TaskRecord]:
        return [record for add in self._stored() for record in add.records]

    # --- there --------------------------------------------------------------------------------------------------------

    def arguments(self, hint: str | None = None) -> tuple[Any, ...]:
        """`hint` is for others, if there is anything to tell them."""
        completed, moves, queues = self._split()
        records = self._records()
        queues.update([record.queue for record in records])
        queues.update([report.claim.record.queue for report in self._reports])
        queues.update([add.parent.record.queue for add in self._stored() if add.parent is not None])
        demand = self._demand if self._demand is not None and self._demand.total > 0 else None
        return (
            self._node, self._now, list(queues), completed, moves, self._said(), self._asked(records),
            *((_joined([r.uuid for r in records]), _joined([r.args for r in records]),
               _columns(records, one_by_one=self.is_careful)) if records else (None, None, None)),
            None if demand is None else encode_demand(demand),
            hint if self._settles or demand is None else None,
        )  # fmt: skip

    def _split(self) -> tuple[Columns | None, str | None, set[str]]:
        """Runs that were completed, in columns; all others; and the queues of both. A claim is spent by the first."""
        ids: list[int] = []
        tokens: list[int] = []
        attempts: list[int] = []
        ats: list[datetime] = []
        results: list[str | None] = []
        notes: list[str | None] = []
        pids: list[int | None] = []
        devices: list[str | None] = []
        moves: list[dict[str, Any]] = []
        queues: set[str] = set()
        seen: set[int] = set()
        is_keyless = True
        for claim, move in self._settles:
            token = claim.token
            if token in seen:
                continue
            seen.add(token)
            record = claim.record
            queues.add(record.queue)
            if move.state is COMPLETED:
                is_keyless = is_keyless and record.key is None
                ids.append(record.id)
                tokens.append(token)
                attempts.append(claim.attempt)
                ats.append(move.at)
                results.append(move.result)
                notes.append(None if move.note is None else to_text(move.note))
                pids.append(move.worker_pid)
                devices.append(move.device)
            else:
                moves.append(_moved(claim, move, len(moves)))
        rare = _given(notes), _given(pids), _given(devices) and list(map(clean, devices))
        columns = (ids, tokens, _alike(attempts), ats, results, *rare, is_keyless) if ids else None
        return columns, msgspec.json.encode(moves).decode() if moves else None, queues

    def _said(self) -> str | None:
        if not self._reports:
            return None
        said = [
            {
                **_held(report.claim),
                "ord": number,
                "progress": to_text(report.progress),
                "note": to_text(report.note),
                "checkpoint": report.checkpoint,
                "worker_pid": report.worker_pid,
            }
            | (_outputs(report) if report.lines or report.artifacts else {})
            for number, report in enumerate(self._reports)
        ]
        return msgspec.json.encode(said).decode()

    def _asked(self, records: list[TaskRecord]) -> str | None:
        if not records or not self.is_careful:
            return None
        asked = [
            {"n": len(add.records), "dedupe": add.dedupe, "window_s": add.window_s}
            | ({} if add.parent is None else _held(add.parent)) | _ties(add) | _key_idle(add)
            | ({"leaves_out": True} if add.leaves_out else {})
            for add in self._stored() if add.records
        ]  # fmt: skip
        return msgspec.json.encode(asked).decode()

    # --- and back -----------------------------------------------------------------------------------------------------

    def answer(self, row: Any) -> Turned:
        settled, answers, columns, next_due, _, said, _ = row
        claims = [] if columns is None else to_claims(columns, self._node, self._now)
        if claims and self._demand is not None and self._demand.only is not None:
            for claim in claims:
                claim.record.device = clean(self._demand.only[claim.record.id])
        ties = {} if said is None else msgspec.json.decode(said)
        tie(claims, ties.get("claims") or [])
        return Turned(self._settled(settled), self._added(answers), claims, next_due, ties.get("finished") or [])

    def _settled(self, tokens: list[int] | None) -> list[ClaimLost | None]:
        if not self._settles:
            return []
        held = set(tokens or ())
        settled: list[ClaimLost | None] = []
        for claim, _ in self._settles:
            if claim.token in held:
                held.discard(claim.token)
                settled.append(None)
            else:
                settled.append(ClaimLost(claim.uuid, claim.token))
        return settled

    def _added(self, answers: list[str] | None) -> list[list[Added] | TaskyardError]:
        given = iter(answers or ())
        added: list[list[Added] | TaskyardError] = []
        for n, add in enumerate(self._adds):
            if n in self._refused:
                added.append(self._refused[n])
            elif answers is None or not add.records:
                added.append([Added(record.uuid) for record in add.records])
            else:
                added.append(answered(add, msgspec.json.decode(next(given)), self._now))
        return added


def _held(claim: Claim) -> dict[str, int]:
    return {"id": claim.record.id, "token": claim.token, "attempt": claim.attempt}


def _outputs(report: Report) -> dict[str, Any]:
    """The lines and artifacts of a report. `msgspec` writes bytes as base64."""
    lines = [clean_all(msgspec.to_builtins(line)) for line in report.lines]
    artifacts = [clean_all(msgspec.to_builtins(artifact)) for artifact in report.artifacts]
    return {"has_outputs": True, "lines": lines or None, "artifacts": artifacts or None}


def _is_special(record: TaskRecord) -> bool:
    return record.note is not None or has_relations(record)


def _ties(add: Add) -> dict[str, Any]:
    """What the tasks of an add have to do with others, where they have. A circle is looked for here, as if none of them
    was merged into a task of the store: only if there is one does the database have to look."""
    ties = []
    for number, record in enumerate(add.records, 1):
        after = add.after.get(record.uuid)
        said = {
            "group": record.group_id,
            "on_failure": record.on_failure or (OnFailure.FAIL if after else None),
            "scope": record.dedupe_scope,
            "note": to_text(record.note),
            "after": after or None,
        }
        if any(value is not None for value in said.values()):
            ties.append({"i": number} | said)
    if not ties:
        return {}
    first: dict[str, str] = {}
    for record in add.records if add.dedupe is Dedupe.MERGE else ():
        if record.dedupe_slot is not None:
            first.setdefault(record.dedupe_slot, record.uuid)
    holders = [first.get(r.dedupe_slot) if r.dedupe_slot is not None else None for r in add.records]
    folded = [None if holder == r.uuid else holder for r, holder in zip(add.records, holders, strict=True)]
    return {"ties": ties, "may_circle": find_cycle(_graph(add, folded)) is not None}


def _key_idle(add: Add) -> dict[str, Any]:
    """For each task of an add, whether a running task with its key is a duplicate; empty if that holds for none."""
    if add.dedupe is Dedupe.ALLOW:
        return {}
    asked = [record.dedupe_scope is DedupeScope.KEY_IDLE and record.key is not None for record in add.records]
    return {"key_idle": asked} if any(asked) else {}


def _graph(add: Add, holders: Sequence[str | None]) -> dict[str, list[str]]:
    """Who waits for whom, when those are gone that were merged into `holders`."""
    stands_for = {
        record.uuid: holder for record, holder in zip(add.records, holders, strict=True) if holder is not None
    }
    return {
        record.uuid: list(dict.fromkeys(stands_for.get(one, one) for one in add.after.get(record.uuid, ())))
        for record, holder in zip(add.records, holders, strict=True)
        if holder is None
    }


def _moved(claim: Claim, move: Move, number: int) -> dict[str, Any]:
    moved: dict[str, Any] = {
        **_held(claim),
        "ord": number,
        "at": move.at,
        "state": move.state,
        "result": move.result,
        "error": to_text(move.error),
        "note": to_text(move.note),
        "detail": to_text(event_detail(RUNNING, move)),
        "due_at": move.due_at,
        "run": move.run,
        "retried": move.retried,
        "crashed": move.crashed,
        "recovered": move.recovered,
        "unspent": move.unspent,
        "to_head": move.to_head,
        "worker_pid": move.worker_pid,
        "device": clean(move.device),
    }
    if move.state in HEEDS_CANCEL:
        # Race: a cancel may be requested after the run has ended and before its node could know.
        asked = heed_cancel(move)
        moved |= {
            "asked_state": asked.state,
            "asked_note": to_text(asked.note),
            "asked_error": to_text(asked.error),
            "asked_detail": to_text(event_detail(RUNNING, asked)),
        }
    return moved


def _columns(records: list[TaskRecord], *, one_by_one: bool) -> Columns:
    """What an insert gives of each task beside its id and arguments, column by column; None for a column that is empty.
    Where a column is the same for all, as most are in a batch, it is given once, unless they are looked at one by
    one."""
    columns: list[list[Any] | None] = []
    for name, read in zip(NEW_TASK_FIELDS, zip(*map(_to_new_row, records), strict=True), strict=True):
        column = list(read)
        if name in _SENT_APART or (name == "dedupe_slot" and not one_by_one):
            columns.append(None)
        elif TASK.fields[name].is_nullable:
            columns.append(column if name == "dedupe_slot" else _given(column))
        else:
            columns.append(column if one_by_one else _alike(column))
    return tuple(columns)


def _joined(texts: list[str]) -> str:
    """The texts as one; `DataError`, as for all that cannot be sent, if they are none or could not be told apart."""
    try:
        joined = SEPARATOR.join(texts)
    except TypeError as exc:
        raise asyncpg.DataError(str(exc)) from None
    if joined.count(SEPARATOR) >= len(texts) or "" in texts:
        raise asyncpg.DataError("a text is empty, or has a character in it that stands between texts")
    return joined


def _given(column: list[Any]) -> list[Any] | None:
    return None if column.count(None) == len(column) else column


def _alike(column: list[Any]) -> list[Any]:
    return column[:1] if column.count(column[0]) == len(column) else column


def answered(add: Add, said: Any, now: datetime) -> list[Added] | TaskyardError:
    """What the database says of one add, in our words. The windows that the add itself opens begin at `now`."""
    if "why" in said:
        return _refused(add, said)
    holders = said["holders"]
    ends = [_to_time(end) for end in said["until"] or repeat(None, len(holders))]
    opened = {
        record.uuid: window_end(record, add, now)
        for record, holder in zip(add.records, holders, strict=True)
        if holder is None
    }
    return [
        Added(record.uuid) if holder is None else Added(holder, is_new=False, until=end or opened.get(holder))
        for record, holder, end in zip(add.records, holders, ends, strict=True)
    ]


def _refused(add: Add, said: Any) -> TaskyardError:
    match said["why"]:
        case "lost":
            assert add.parent is not None
            return ClaimLost(add.parent.uuid, add.parent.token)
        case "duplicate":
            return DuplicateTask(said["uuid"], said["slot"], until=_to_time(said["until"]), key=said["key"])
        case "quarantined":
            return AccountQuarantined(read_account(said["key"]), said["consumer"], said["queue"])
        case "busy":
            return SubmitPending()
        case "unknown":
            return UnknownTask(said["uuid"])
        case "cycle":
            return DependencyCycle(find_cycle(_graph(add, said["holders"])) or [])
        case _:
            return InvalidInput(f"a task {said['uuid']} is in the store already; a task's uuid must be new")


def _to_time(said: str | None) -> datetime | None:
    return None if said is None else datetime.fromisoformat(said).astimezone(UTC)
