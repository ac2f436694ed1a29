"""What is only read: short queries, each on a connection from the pool."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine
from taskyard.model.beats import Beat
from taskyard.model.blocker import BlockerKind
from taskyard.model.catalogue import ConsumerSpec, StoredSpec
from taskyard.model.event import Event, EventDetail, EventKind, EventPage
from taskyard.model.execution import ExecutionError
from taskyard.model.failures import FailureGroup
from taskyard.model.limits import Demand
from taskyard.model.node import Node, NodeStatus
from taskyard.model.notes import CancelRequest
from taskyard.model.queue import UNTOUCHED, QueueControl, QueueSettings, QueueStatus
from taskyard.model.settle import QUARANTINE_AFTER
from taskyard.model.state import ENDED as ENDED_STATES
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Claim, Outcome, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import ATTEMPTS_KEPT, BlockedGroup, Signals
from taskyard.stores.postgres.connection import Connection, Session
from taskyard.stores.postgres.constants import EVENTS_AT_MOST
from taskyard.stores.postgres.rows import FINISHED, HOT, clean, encode_demand, from_row
from taskyard.stores.records import ARTIFACT, ARTIFACT_FACTS, ATTEMPT, LINE, OUTCOME, POSTGRES, document_reader

_KINDS = {str(kind): kind for kind in EventKind}
_read_cancel = document_reader(CancelRequest)
_read_detail = document_reader(EventDetail)
_read_error = document_reader(ExecutionError)
_to_outcome = OUTCOME.reader(POSTGRES)
_to_attempt = ATTEMPT.reader(POSTGRES)
_to_line = LINE.reader(POSTGRES)
_to_artifact, _to_artifact_facts = ARTIFACT.reader(POSTGRES), ARTIFACT.reader(POSTGRES, ARTIFACT_FACTS)


ENDS_AMONG = 200_000
"""Of so many tasks, the newest of those that have ended and of those that have not, one is found by how its id ends: no
index knows that, and history has no end."""


async def signals(conn: Connection, node: str) -> Signals:
    draining = await conn.fetchval("SELECT is_draining FROM taskyard.node WHERE incarnation = $1", node)
    rows = await conn.fetch(
        "SELECT uuid, cancel FROM taskyard.task "
        "WHERE state = 'running' AND node = $1 AND cancel IS NOT NULL ORDER BY node, id",
        node,
    )
    forced = tuple(uuid for uuid, cancel in rows if (read := _read_cancel(cancel)) is not None and read.is_forced)
    return Signals([uuid for uuid, _ in rows], is_draining=bool(draining), forced=forced)


async def is_held(conn: Connection, claim: Claim) -> bool:
    """Whether that run still has its task."""
    sql = "SELECT id FROM taskyard.task WHERE id = $1 AND token = $2 AND attempt = $3"
    return await conn.fetchval(sql, claim.record.id, claim.token, claim.attempt) is not None


async def outcomes(conn: Connection, uuids: Sequence[str]) -> list[Outcome | None]:
    rows = await conn.fetch(
        "SELECT uuid, state, NULL::text AS result, error, cancel FROM taskyard.task WHERE uuid = ANY ($1) UNION ALL "
        "SELECT uuid, state, result, error, cancel FROM taskyard.finished WHERE uuid = ANY ($1)",
        [uuid for uuid in dict.fromkeys(uuids) if clean(uuid) == uuid],
    )
    found = {row[0]: _to_outcome(row) for row in rows}
    return [found.get(uuid) for uuid in uuids]


async def events(conn: Connection, after: int, limit: int) -> EventPage:
    newest, gone, page = await conn.fetchrow("SELECT * FROM taskyard.read_events_1($1, $2)", after, limit)  # type: ignore[misc]
    found: list[Event] = []
    for xid, first, _, kind, queue, consumer, ats, uuids, details in page or ():
        number = xid * EVENTS_AT_MOST + first
        for place, uuid in enumerate(uuids):
            if number + place > after and len(found) < limit:
                at: datetime = ats[place] if len(ats) > 1 else ats[0]
                detail = None if details is None or details[place] is None else _read_detail(details[place])
                found.append(Event.of(number + place, at, _KINDS[kind], uuid, consumer, queue, detail))
    if after > newest:
        # Where that is may lie before what was told already, for as long as it is not known who is still writing.
        last = await conn.fetchval(_LAST_EVENT) or gone
        return EventPage([], min(after, last), missed=after > last)
    return EventPage(found, found[-1].seq if found else newest, missed=0 <= after < gone)


_LAST_EVENT = f"SELECT xid * {EVENTS_AT_MOST} + first + n - 1 FROM taskyard.event ORDER BY xid DESC, first DESC LIMIT 1"


async def find(conn: Connection, uuid: str) -> TaskRecord | None:
    if clean(uuid) != uuid:
        return None
    row = await conn.fetchrow(
        f"SELECT {HOT} FROM taskyard.task WHERE uuid = $1 UNION ALL "
        f"SELECT {FINISHED} FROM taskyard.finished WHERE uuid = $1 LIMIT 1",
        uuid,
    )
    return None if row is None else from_row(row)


async def find_tasks(conn: Connection, uuids: Sequence[str]) -> dict[str, TaskRecord]:
    rows = await conn.fetch(
        f"SELECT {HOT} FROM taskyard.task WHERE uuid = ANY ($1) UNION ALL "
        f"SELECT {FINISHED} FROM taskyard.finished WHERE uuid = ANY ($1)",
        [uuid for uuid in uuids if clean(uuid) == uuid],
    )
    return {record.uuid: record for record in map(from_row, rows)}


async def list_uuids(conn: Connection, fragment: str, limit: int) -> list[str]:
    if clean(fragment) != fragment:
        return []
    # Ids of one millisecond differ at the end only, so ends count as well.
    begins = "SELECT uuid FROM taskyard.{} WHERE starts_with(uuid, $1)"
    ends = (
        "SELECT uuid FROM (SELECT uuid FROM taskyard.{} ORDER BY id DESC LIMIT $3) AS newest "
        "WHERE right(uuid, length($1)) = $1 AND length($1) > 0"
    )
    sql = " UNION ".join(part.format(table) for table in ("task", "finished") for part in (begins, ends))
    return [uuid for (uuid,) in await conn.fetch(f"{sql} LIMIT $2", fragment, limit, ENDS_AMONG)]


async def list_tasks(conn: Connection, where: TaskFilter, before_id: int | None, limit: int) -> list[TaskRecord]:
    return [from_row(row) for row in await _select(conn, HOT, FINISHED, where, before_id, limit)]


async def list_ids(conn: Connection, where: TaskFilter, before_id: int | None, limit: int) -> list[tuple[int, str]]:
    return [(id_, uuid) for id_, uuid in await _select(conn, "id, uuid", "id, uuid", where, before_id, limit)]


async def preview(conn: Connection, demand: Demand, now: datetime) -> list[TaskRecord]:
    # Race: another transaction may have started or ended some of them since.
    rows = await conn.fetch(
        f"SELECT {HOT} FROM unnest(taskyard.preview_1($1, $2)) WITH ORDINALITY AS picked(task_id, place) "
        "JOIN taskyard.task ON task.id = ANY (ARRAY[picked.task_id]) WHERE state = 'queued' ORDER BY place",
        now,
        encode_demand(demand),
    )
    return [from_row(row) for row in rows]


async def list_lanes(conn: Connection) -> list[str]:
    return [lane for (lane,) in await conn.fetch("SELECT DISTINCT lane FROM taskyard.lane ORDER BY lane")]


async def list_blockers(conn: Connection) -> list[BlockedGroup]:
    rows = await conn.fetch(
        "SELECT b.blocked_by, b.consumer, b.n, task.uuid FROM ("
        "SELECT blocked_by, consumer, count(*) AS n, min(id) AS id FROM taskyard.task "
        "WHERE blocked_by IS NOT NULL GROUP BY blocked_by, consumer) AS b "
        "JOIN taskyard.task ON task.id = ANY (ARRAY[b.id]) ORDER BY b.blocked_by, b.consumer"
    )
    return [BlockedGroup(*row) for row in rows]


async def list_origins(conn: Connection, uuids: Sequence[str]) -> set[str]:
    parts = (f"SELECT origin FROM taskyard.{table} WHERE origin = ANY ($1::text[])" for table in ("task", "finished"))
    return {origin for (origin,) in await conn.fetch(" UNION ".join(parts), list(uuids))}


async def list_known(conn: Connection, uuids: Sequence[str]) -> set[str]:
    parts = (f"SELECT uuid FROM taskyard.{table} WHERE uuid = ANY ($1)" for table in ("task", "finished"))
    asked = [uuid for uuid in uuids if clean(uuid) == uuid]
    return {uuid for (uuid,) in await conn.fetch(" UNION ALL ".join(parts), asked)}


# An error that nobody raised has no types, and goes by its kind.
_NAMED = "coalesce(error::jsonb -> 'types', jsonb_build_array(error::jsonb -> 'kind')) ? ${n}"


def _terms(where: TaskFilter, values: list[Any]) -> list[str]:
    """What a filter asks, as `TaskFilter.matches` puts it, but for states and the time of the end; adds to `values`."""
    terms = []
    for term, value in (
        ("queue = ${n}", clean(where.queue)),
        ("consumer = ${n}", clean(where.consumer)),
        ("key = ${n}", clean(where.key)),
        ("node = ${n}", clean(where.node)),
        (_NAMED, clean(where.error)),
        ("(starts_with(uuid, ${n}) OR right(uuid, length(${n})) = ${n})", clean(where.uuid)),
        ("created_at >= ${n}", where.created_after),
        ("created_at < ${n}", where.created_before),
        (f"(state = 'failed' AND crashes >= {QUARANTINE_AFTER}) = ${{n}}", where.quarantined),
        ("id IN (SELECT id FROM taskyard.task_relation WHERE group_id = ${n})", clean(where.group)),
    ):
        if value is not None:
            values.append(value)
            terms.append(term.replace("{n}", str(len(values))))
    if where.blocker == BlockerKind.DEPENDENCY:
        terms.append("state = 'blocked' AND blocked_by IS NULL")
    elif where.blocker is not None:
        # By the index `task_blocked`: a key, or all keys of a kind.
        values.append(clean(where.blocker))
        n = f"${len(values)}::text"
        is_one = (
            f"blocked_by = {n}" if ":" in where.blocker else f"blocked_by >= {n} || ':' AND blocked_by < {n} || ';'"
        )
        terms.append(f"blocked_by IS NOT NULL AND {is_one}")
    for name, value in where.labels.items():
        values += clean(name), clean(value)
        of_label = f"name = ${len(values) - 1} AND value = ${len(values)}"
        terms.append(f"id IN (SELECT task FROM taskyard.task_label WHERE {of_label})")
    return terms


def _end_terms(where: TaskFilter, values: list[Any]) -> list[str]:
    terms = []
    for sign, at in ((">=", where.finished_after), ("<", where.finished_before)):
        if at is not None:
            values.append(at)
            terms.append(f"finished_at {sign} ${len(values)}")
    return terms


async def _select(
    conn: Connection, hot: str, ended: str, where: TaskFilter, before_id: int | None, limit: int
) -> list[Any]:
    parts = []
    values: list[Any] = [before_id if before_id is not None else 1 << 62, limit]
    terms = ["id < $1", *_terms(where, values)]
    for table, columns, states in (
        ("task", hot, frozenset(TaskState) - ENDED_STATES),
        ("finished", ended, ENDED_STATES),
    ):
        own = list(terms)
        if table == "task" and (where.finished_after is not None or where.finished_before is not None):
            continue
        if table == "finished" and (where.node is not None or where.blocker is not None):
            continue
        own += _end_terms(where, values)
        asked = states if where.states is None else states & set(where.states)
        if asked:
            # Written out, so that the index of one state can serve.
            state = "" if asked == states else f" AND state IN ({', '.join(repr(str(one)) for one in sorted(asked))})"
            parts.append(
                f"(SELECT {columns} FROM taskyard.{table} WHERE {' AND '.join(own)}{state} ORDER BY id DESC LIMIT $2)"
            )
    if not parts:
        return []
    return await conn.fetch(f"SELECT * FROM ({' UNION ALL '.join(parts)}) AS t ORDER BY id DESC LIMIT $2", *values)


async def list_attempts(conn: Connection, uuid: str) -> list[Attempt]:
    if clean(uuid) != uuid:
        return []
    rows = await conn.fetch(
        "WITH t AS (SELECT id FROM taskyard.task WHERE uuid = $1 UNION ALL "
        "SELECT id FROM taskyard.finished WHERE uuid = $1) "
        "SELECT attempt, token, node, state, started_at, finished_at, error, worker_pid, device FROM taskyard.attempt "
        "WHERE task IN (SELECT id FROM t) UNION ALL "
        "SELECT attempt, run_token, run_node, state, started_at, finished_at, NULL, run_worker_pid, run_device "
        "FROM taskyard.finished WHERE uuid = $1 AND run_token IS NOT NULL UNION ALL "
        "SELECT attempt, token, node, state, started_at, NULL, NULL, worker_pid, device FROM taskyard.task "
        "WHERE uuid = $1 AND token IS NOT NULL ORDER BY token DESC LIMIT $2",
        uuid,
        ATTEMPTS_KEPT,
    )
    return [_to_attempt(row) for row in reversed(rows)]


_OF_TASK = (
    "task IN (SELECT id FROM taskyard.task WHERE uuid = $1 UNION ALL SELECT id FROM taskyard.finished WHERE uuid = $1)"
)


async def list_lines(conn: Connection, uuid: str, token: int | None, limit: int) -> list[AttemptLine]:
    if clean(uuid) != uuid:
        return []
    rows = await conn.fetch(
        f"SELECT token, {', '.join(LINE.columns)} FROM taskyard.attempt_line "
        f"WHERE {_OF_TASK} AND ($2::bigint IS NULL OR token = $2) ORDER BY token DESC, at DESC LIMIT $3",
        uuid,
        token,
        limit,
    )
    return [AttemptLine(token, _to_line(line)) for token, *line in reversed(rows)]


async def list_artifacts(conn: Connection, uuid: str) -> list[AttemptArtifact]:
    if clean(uuid) != uuid:
        return []
    rows = await conn.fetch(
        f"SELECT token, {', '.join(ARTIFACT_FACTS)} FROM taskyard.artifact WHERE {_OF_TASK} ORDER BY token, name", uuid
    )
    return [AttemptArtifact(token, _to_artifact_facts(facts)) for token, *facts in rows]


async def find_artifact(conn: Connection, uuid: str, token: int, name: str) -> Artifact | None:
    if clean(uuid) != uuid or clean(name) != name:
        return None
    row = await conn.fetchrow(
        f"SELECT {', '.join(ARTIFACT.columns)} FROM taskyard.artifact WHERE {_OF_TASK} AND token = $2 AND name = $3",
        uuid,
        token,
        name,
    )
    return None if row is None else _to_artifact(row)


async def find_end(conn: Connection, n: int, failed: bool | None) -> datetime | None:
    where = {None: "", True: "WHERE state = 'failed'", False: "WHERE state <> 'failed'"}[failed]
    at: datetime | None = await conn.fetchval(
        f"SELECT finished_at FROM taskyard.finished {where} ORDER BY finished_at DESC LIMIT 1 OFFSET $1", n - 1
    )
    return at


_FAILURES = (
    "SELECT DISTINCT ON (error_type, consumer, is_quarantined) error_type, consumer, is_quarantined, "
    "count(*) OVER one AS n, finished_at, uuid, error FROM (SELECT consumer, finished_at, uuid, "
    f"crashes >= {QUARANTINE_AFTER} AS is_quarantined, "
    "coalesce(error::jsonb -> 'types' ->> 0, error::jsonb ->> 'kind', '') AS error_type, error "
    "FROM taskyard.finished WHERE {}) AS failed "
    "WINDOW one AS (PARTITION BY error_type, consumer, is_quarantined) "
    "ORDER BY error_type, consumer, is_quarantined, finished_at DESC"
)


async def failures(conn: Connection, where: TaskFilter, limit: int) -> list[FailureGroup]:
    if (
        where.node is not None
        or where.blocker is not None
        or (where.states is not None and TaskState.FAILED not in where.states)
    ):
        return []
    values: list[Any] = [limit]
    terms = ["state = 'failed'", *_terms(where, values), *_end_terms(where, values)]
    sql = f"SELECT * FROM ({_FAILURES.format(' AND '.join(terms))}) AS g ORDER BY n DESC, finished_at DESC LIMIT $1"
    return [
        FailureGroup(
            error=name,
            consumer=consumer,
            is_quarantined=apart,
            count=n,
            newest_at=at,
            uuid=uuid,
            message=_message(error),
        )
        for name, consumer, apart, n, at, uuid, error in await conn.fetch(sql, *values)
    ]


def _message(error: str | None) -> str:
    read = None if error is None else _read_error(error)
    return "" if read is None else read.text


async def count(conn: Connection) -> dict[tuple[str, TaskState], int]:
    rows = await conn.fetch(
        "SELECT queue, state, sum(c.n)::bigint FROM ("
        "SELECT * FROM taskyard.compaction ORDER BY n DESC LIMIT 1) AS t CROSS JOIN LATERAL ("
        "SELECT queue, state, n FROM taskyard.state_count WHERE xid >= t.state_count_from AND queue <> '' UNION ALL "
        "SELECT queue, 'scheduled', n FROM taskyard.external_count WHERE xid >= t.external_count_from) AS c "
        "GROUP BY queue, state HAVING sum(c.n) <> 0"
    )
    return {(queue, TaskState(state)): n for queue, state, n in rows}


async def count_group(conn: Connection, group: str) -> dict[TaskState, int]:
    rows = await conn.fetch(
        "SELECT state, count(*) FROM (SELECT t.state FROM taskyard.task_relation JOIN taskyard.task AS t USING (id) "
        "WHERE group_id = $1 AND t.uuid <> $1 UNION ALL "
        "SELECT e.state FROM taskyard.task_relation JOIN taskyard.finished AS e USING (id) "
        "WHERE group_id = $1 AND e.uuid <> $1) AS members GROUP BY state",
        clean(group),
    )
    return {TaskState(state): n for state, n in rows}


async def queues(conn: Connection, name: str | None = None) -> list[QueueStatus]:
    """All of them, or the one of this name, be there anything of it or not."""
    rules = {row["name"]: row for row in await conn.fetch("SELECT name, settings, control FROM taskyard.queue")}
    counts: dict[str, dict[TaskState, int]] = {}
    for (queue, state), n in (await count(conn)).items():
        counts.setdefault(queue, {})[state] = n
    found = await conn.fetch(
        "SELECT l.queue, min(t.due_at) FROM taskyard.lane AS l "
        "CROSS JOIN LATERAL (VALUES (0, l.low_0), (1, l.low_1), (2, l.low_2)) AS p(level, was) "
        "CROSS JOIN LATERAL (SELECT due_at FROM taskyard.task WHERE queue = l.queue AND lane = l.lane "
        "AND state = 'queued' AND NOT is_parked AND priority = p.level::smallint ORDER BY position LIMIT 1) AS t "
        "WHERE p.was IS NOT NULL GROUP BY l.queue"
    )
    oldest: dict[str, datetime] = {queue: due_at for queue, due_at in found}  # noqa: C416 - they are no tuples
    return [
        QueueStatus(
            name=queue,
            settings=msgspec.json.decode(rules[queue]["settings"], type=QueueSettings)
            if queue in rules
            else QueueSettings(name=queue),
            control=msgspec.json.decode(rules[queue]["control"], type=QueueControl)
            if queue in rules and rules[queue]["control"] is not None
            else UNTOUCHED,
            counts=counts.get(queue, {}),
            oldest_due_at=oldest.get(queue),
        )
        for queue in ([name] if name is not None else sorted({*rules, *counts}))
    ]


class _Joined(msgspec.Struct):
    """What stands beside what a node says of itself."""

    ahead_s: float | None = None


async def nodes(conn: Connection) -> list[NodeStatus]:
    rows = await conn.fetch(
        "SELECT info, beat_at, beat_at < now() - make_interval(secs => lease_s), is_draining, "
        "(SELECT count(*) FROM taskyard.task WHERE state = 'running' AND node = incarnation) "
        "FROM taskyard.node ORDER BY incarnation"
    )
    return [
        NodeStatus(
            node=msgspec.json.decode(info, type=Node),
            running=running,
            beat_at=beat_at,
            is_silent=is_silent,
            is_draining=is_draining,
            ahead_s=msgspec.json.decode(info, type=_Joined).ahead_s,
        )
        for info, beat_at, is_silent, is_draining, running in rows
    ]


async def list_specs(conn: Connection) -> list[StoredSpec]:
    rows = await conn.fetch("SELECT spec, seen_at FROM taskyard.consumer ORDER BY name, seen_at DESC, hash")
    return [StoredSpec(spec=msgspec.json.decode(spec, type=ConsumerSpec), seen_at=seen_at) for spec, seen_at in rows]


async def beats(conn: Connection) -> tuple[dict[str, Beat], str]:
    """How often each node has beaten, and which transactions run."""
    row = await conn.fetchrow(
        "SELECT array_agg(incarnation), array_agg(beats), array_agg(lease_s), pg_current_snapshot()::text "
        "FROM taskyard.node"
    )
    assert row is not None
    nodes, counted, leases, snapshot = row
    return dict(zip(nodes or (), map(Beat, counted or (), leases or ()), strict=True)), snapshot


async def end_session(conn: Connection, session: Session, within_ms: int) -> bool:
    """End another session of ours; whether it is gone."""
    is_gone: bool = await conn.fetchval(
        "SELECT coalesce(bool_and(pg_terminate_backend(pid, $3)), true) FROM pg_stat_activity "
        "WHERE pid = $1 AND backend_start = $2",
        *session,
        within_ms,
    )
    return is_gone
