"""Records as rows of PostgreSQL: the two tables read alike, and texts that it can store."""

from __future__ import annotations

from datetime import datetime
from itertools import repeat
from operator import attrgetter
from typing import Any

from taskyard.model.state import RUNNING, TaskState
from taskyard.model.task import Claim, DedupeScope, TaskRecord
from taskyard.stores.migrate import LONGEST_NAME_BYTES, SEPARATOR
from taskyard.stores.rows import COLUMNS, TIES, to_error, to_on_failure, to_progress, to_retry, to_scope

_TOKEN = attrgetter("token")
_STATES = {str(state): state for state in TaskState}


def _tied(table: str) -> dict[str, str]:
    """What a task has to do with others stands in a table of its own."""
    found = {column: f"(SELECT {column} FROM taskyard.tie WHERE tie.id = {table}.id)" for column in TIES}
    return found | {"waits": f"coalesce({found['waits']}, 0)"}


_NOT_HOT = {**_tied("task"), "finished_at": "NULL::timestamptz", "result": "NULL::text"}
_NOT_ENDED = {
    **_tied("ended"),
    "updated_at": "finished_at",
    "parked": "false",
    "dedupe_slot": "NULL::text",
    "token": "NULL::bigint",
    "node": "NULL::text",
    "cancel_asked_at": "NULL::timestamptz",
    "cancel_reason": "NULL::text",
    "cancel_forced": "false",
}

HOT = ", ".join(f"{_NOT_HOT.get(column, column)} AS {column}" for column in COLUMNS)
"""The columns of a record, as the table `task` has them."""

ENDED = ", ".join(f"{_NOT_ENDED.get(column, column)} AS {column}" for column in COLUMNS)
"""The same of the table `ended`."""


def from_row(row: Any) -> TaskRecord:
    """The record of a row that begins with the columns of `HOT` or `ENDED`."""
    (
        uuid, source, due_at, created_at, updated_at, id_, queue, args, state, priority, position, parked, key, slot,
        timeout_s, retry, started_at, finished_at, attempt, retries, crashes, recoveries, token, node, cancel_asked_at,
        progress, result, error, note, cancel_reason, checkpoint, bucket, group_id, waits, on_failure, dedupe_key,
        scope, origin, cancel_forced,
    ) = row[: len(COLUMNS)]  # fmt: skip
    return TaskRecord(
        uuid, source, due_at, created_at, updated_at, id_, queue, args, _STATES[state], priority, position, parked, key,
        slot, timeout_s, None if retry is None else to_retry(retry), started_at, finished_at, attempt, retries, crashes,
        recoveries, token, node, cancel_asked_at, to_progress(progress), result, to_error(error), note, cancel_reason,
        checkpoint, bucket, group_id, waits, to_on_failure(on_failure), dedupe_key, to_scope(scope), origin,
        cancel_forced,
    )  # fmt: skip


def to_claims(columns: Any, node: str, now: datetime) -> list[Claim]:
    """The claims of a row of the type `claims_1`, which was made at `now` for this node."""
    ids, *often = columns[:11]
    zeros, nones = repeat(0), repeat(None)
    (
        timeouts, retries, crashes, recoveries, keys, slots, policies, progress, errors, checkpoints, buckets, origins,
    ) = columns[11:]  # fmt: skip
    seldom = (
        timeouts or nones, retries or zeros, crashes or zeros, recoveries or zeros, keys or nones, slots or nones,
        policies or nones, progress or nones, errors or nones, checkpoints or nones,
        buckets or nones, origins or nones,
    )  # fmt: skip
    claims = [_to_claim(row, node, now) for row in zip(ids, *often, *seldom, strict=False)]
    claims.sort(key=_TOKEN)  # as they mostly are; no query promises it
    return claims


def _to_claim(row: Any, node: str, now: datetime) -> Claim:
    (
        id_, token, position, due_at, created_at, attempt, priority, uuid, source, queue, args, timeout_s, retries,
        crashes, recoveries, key, slot, retry, progress, error, checkpoint, bucket, origin,
    ) = row  # fmt: skip
    record = TaskRecord(
        uuid, source, due_at, created_at, now, id_, queue, args, RUNNING, priority, position, False, key, slot,
        timeout_s, None if retry is None else to_retry(retry), now, None, attempt, retries, crashes, recoveries, token,
        node, None, None if progress is None else to_progress(progress), None,
        None if error is None else to_error(error), None, None, checkpoint, bucket, origin=origin,
    )  # fmt: skip
    return Claim(record, attempt, token)


def tie(claims: list[Claim], ties: list[list[Any]]) -> None:
    """Put down what tasks that were just claimed have to do with others."""
    tied = {id_: known for id_, *known in ties}
    for record in (claim.record for claim in claims if claim.record.id in tied):
        record.group_id, on_failure, record.dedupe_key, scope = tied[record.id]
        record.on_failure, record.dedupe_scope = to_on_failure(on_failure), to_scope(scope)
        if record.dedupe_scope is DedupeScope.QUEUED:
            record.dedupe_slot = None


def clean(text: str | None) -> str | None:
    """A text that PostgreSQL can store: it has no NUL, and only what UTF-8 can say."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def find_unstorable(record: TaskRecord) -> str | None:
    """Why this record can never be stored; None if it can."""
    for name in ("uuid", "source", "queue", "key", "dedupe_slot", "group_id", "bucket", "origin", "args"):
        text = getattr(record, name)
        if name in ("uuid", "args") and not text:
            return f"its {name} is empty"
        if text is None:
            continue
        if not isinstance(text, str):
            return f"its {name} is no text"
        if clean(text) != text or (SEPARATOR in text and name in ("uuid", "args")):
            return f"its {name} has characters that cannot be stored"
        if name != "args" and len(text.encode()) > LONGEST_NAME_BYTES:
            return f"its {name} is longer than {LONGEST_NAME_BYTES} bytes"
    if record.priority not in (0, 1, 2):
        return "its priority is none of 0, 1 and 2"
    if record.timeout_s is not None and not isinstance(record.timeout_s, int | float):
        return "its timeout_s is no number"
    return None
