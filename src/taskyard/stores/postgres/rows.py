"""Records as rows of PostgreSQL: the two tables read alike, and texts that it can store."""

from __future__ import annotations

from datetime import datetime
from itertools import repeat
from operator import attrgetter
from typing import Any

import msgspec

from taskyard.model.blocker import SEPARATOR as LANE_SEPARATOR
from taskyard.model.limits import Demand
from taskyard.model.task import Claim, DedupeScope, Mark, OnFailure, TaskRecord
from taskyard.stores.postgres.constants import LONGEST_NAME_BYTES, SEPARATOR
from taskyard.stores.records import CLAIM_FIELDS, POSTGRES, RELATIONS, SET_BY_START, TASK, Kind, to_document

_TOKEN = attrgetter("token")
_RELATIONS = {
    name: f"(SELECT {name} FROM taskyard.task_relation WHERE task_relation.id = {{0}}.id)" for name in RELATIONS
} | {
    "open_dependencies": "coalesce((SELECT open_dependencies FROM taskyard.task_relation "
    "WHERE task_relation.id = {0}.id), 0)"
}
_NULLS = {Kind.TEXT: "NULL::text", Kind.DOCUMENT: "NULL::text", Kind.ENUM: "NULL::text", Kind.INTEGER: "NULL::bigint",
          Kind.TIME: "NULL::timestamptz", Kind.BOOLEAN: "false"}  # fmt: skip


def _columns(table: str, missing: Mark, **instead: str) -> str:
    """The columns of a record, as this table has them: some stand in another table, and some it does not have."""
    columns = []
    for name, field in TASK.fields.items():
        found = _RELATIONS[name].format(table) if name in _RELATIONS else instead.get(name, name)
        columns.append(f"{_NULLS[field.kind] if field.marks & missing else found} AS {name}")
    return ", ".join(columns)


HOT = _columns("task", Mark.FINAL)
"""The columns of a record, from the table `task`."""

FINISHED = _columns("finished", Mark.LIVE, updated_at="finished_at")
"""The same from the table `finished`."""

_to_record = TASK.reader(POSTGRES)
_claimed = TASK.reader(POSTGRES, CLAIM_FIELDS, SET_BY_START | {"node": "node"}, "node, now")
_DEFAULTS = [repeat(0 if TASK.fields[name].kind is Kind.INTEGER else None) for name in CLAIM_FIELDS]


def from_row(row: Any) -> TaskRecord:
    """The record of a row that begins with the columns of `HOT` or `FINISHED`."""
    record: TaskRecord = _to_record(row[: len(TASK.columns)])
    return record


def to_claims(columns: Any, node: str, now: datetime) -> list[Claim]:
    """The claims of a value of the type `claims_1`, which was made at `now` for this node. A column that is null has
    nothing for any of them."""
    filled = [default if column is None else column for column, default in zip(columns, _DEFAULTS, strict=True)]
    claims = []
    for row in zip(*filled, strict=False):
        record = _claimed(row, node, now)
        claims.append(Claim(record, record.attempt, record.token))
    claims.sort(key=_TOKEN)  # as they mostly are; no query promises it
    return claims


def encode_demand(demand: Demand) -> tuple[Any, ...]:
    """A demand as a value of the type `demand_1`."""
    only = demand.only
    named = (None, None) if only is None else (list(only), [clean(device) for device in only.values()])
    return (demand.total, list(demand.per_lane), list(demand.per_lane.values()), demand.others, *named)


def tie(claims: list[Claim], ties: list[list[Any]]) -> None:
    """Put down what tasks that were just claimed have to do with others."""
    tied = {id_: known for id_, *known in ties}
    for record in (claim.record for claim in claims if claim.record.id in tied):
        record.group_id, on_failure, record.dedupe_key, scope = tied[record.id]
        record.on_failure = None if on_failure is None else OnFailure(on_failure)
        record.dedupe_scope = None if scope is None else DedupeScope(scope)
        if record.dedupe_scope is DedupeScope.QUEUED:
            record.dedupe_slot = None


def clean(text: str | None) -> str | None:
    """A text that PostgreSQL can store: it has no NUL, and only what UTF-8 can say."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def to_text(value: msgspec.Struct | None) -> str | None:
    """A value as JSON that PostgreSQL can store and read."""
    if value is None:
        return None
    try:
        text = to_document(value)
        if "\\u0000" not in text:
            return text
    except UnicodeEncodeError:
        pass
    return msgspec.json.encode(clean_all(msgspec.to_builtins(value))).decode()


def clean_all(value: Any) -> Any:
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(name): clean_all(one) for name, one in value.items()}
        case list():
            return [clean_all(one) for one in value]
    return value


_TEXTS = ("uuid", "consumer", "queue", "key", "dedupe_slot", "group_id", "bucket", "requires", "origin", "args")


def find_unstorable(record: TaskRecord) -> str | None:
    """Why this record can never be stored; None if it can."""
    for name in _TEXTS:
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
    if LANE_SEPARATOR in record.consumer:
        return "its consumer has a character that stands between a consumer and what is required"
    if record.requires is not None and len(record.lane.encode()) > LONGEST_NAME_BYTES:
        return f"its consumer and what it requires are longer than {LONGEST_NAME_BYTES} bytes"
    if record.priority not in (0, 1, 2):
        return "its priority is none of 0, 1 and 2"
    if record.timeout_s is not None and not isinstance(record.timeout_s, int | float):
        return "its timeout_s is no number"
    return None
