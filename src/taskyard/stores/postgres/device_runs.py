"""The history of devices in PostgreSQL. A completed attempt is in `finished`, one that runs in `task`, any other in
`attempt`: each part is read by an index of what ran on a device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from taskyard.model.device import DeviceRun, RunFilter, RunTally
from taskyard.model.execution import ExecutionError
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.rows import clean
from taskyard.stores.records import document_reader

# Each part with the names that it has for device, account, token and start, and where its tasks are.
_COMPLETED = (
    "SELECT f.run_token AS token, f.id AS task, f.run_device AS device, f.key AS account, f.consumer, f.uuid, "
    "f.attempt, f.started_at, f.finished_at, f.state, NULL AS error FROM taskyard.finished AS f "
    "WHERE f.run_device IS NOT NULL"
)
_OTHERS = (
    "SELECT r.token, r.task, r.device, r.account, coalesce(t.consumer, f.consumer), coalesce(t.uuid, f.uuid), "
    "r.attempt, r.started_at, r.finished_at, r.state, r.error FROM taskyard.attempt AS r "
    "LEFT JOIN taskyard.task AS t ON t.id = r.task LEFT JOIN taskyard.finished AS f ON f.id = r.task "
    "WHERE r.device IS NOT NULL"
)
_RUNNING = (
    "SELECT t.token, t.id, t.device, t.key, t.consumer, t.uuid, t.attempt, t.started_at, NULL, t.state, NULL "
    "FROM taskyard.task AS t WHERE t.state = 'running' AND t.device IS NOT NULL"
)
_NAMES = {
    _COMPLETED: ("f.run_device", "f.key", "f.run_token", "f.started_at", "f.queue", "f.consumer"),
    _OTHERS: (
        "r.device", "r.account", "r.token", "r.started_at", "coalesce(t.queue, f.queue)",
        "coalesce(t.consumer, f.consumer)",
    ),
    _RUNNING: ("t.device", "t.key", "t.token", "t.started_at", "t.queue", "t.consumer"),
}  # fmt: skip

_read_error = document_reader(ExecutionError)


async def list_runs(
    conn: Connection, where: RunFilter, limit: int, before: tuple[int, int] | None
) -> list[tuple[tuple[int, int], DeviceRun]]:
    # Tokens grow from claim to claim, over all tasks.
    values: list[Any] = [(1 << 62) if before is None else before[0]]
    parts = []
    for part, names in _NAMES.items():
        token = names[2]
        parts.append(f"({part} AND {token} < $1 {_terms(part, where, values)} ORDER BY {token} DESC LIMIT {limit:d})")
    sql = f"SELECT * FROM ({' UNION ALL '.join(parts)}) AS runs ORDER BY token DESC LIMIT {limit:d}"
    return [((token, task), _to_run(run)) for token, task, *run in await conn.fetch(sql, *values)]


async def tally_runs(conn: Connection, where: RunFilter, by_account: bool) -> list[RunTally]:
    values: list[Any] = []
    completed, others = (f"{part} {_terms(part, where, values)}" for part in (_COMPLETED, _OTHERS))
    name = "account" if by_account else "device"
    # An attempt that was cut short through no fault of device or node has no error, and is not counted.
    sql = (
        f"SELECT {name}, count(*) FILTER (WHERE state = 'completed'), "
        "count(*) FILTER (WHERE state IN ('failed', 'retrying')), count(*) FILTER (WHERE state = 'interrupted'), "
        "count(*) FILTER (WHERE state = 'canceled'), sum(extract(epoch FROM finished_at - started_at))::float8, "
        f"max(finished_at) FROM ({completed} UNION ALL {others}) AS runs "
        f"WHERE {name} IS NOT NULL AND NOT (state = 'interrupted' AND error IS NULL) GROUP BY 1"
    )
    tallies = [
        RunTally(
            name=one,
            completed=done,
            failed=failed,
            interrupted=interrupted,
            canceled=canceled,
            busy_s=busy_s,
            last_at=last_at,
        )
        for one, done, failed, interrupted, canceled, busy_s, last_at in await conn.fetch(sql, *values)
    ]
    return sorted(tallies, key=lambda tally: tally.name)


def _terms(part: str, where: RunFilter, values: list[Any]) -> str:
    """What a filter asks of a part. Its values are added to `values`."""
    device, account, _, started_at, queue, consumer = _NAMES[part]
    asked: list[tuple[str, str, str | datetime | None]] = [
        (device, "=", clean(where.device)),
        (account, "=", clean(where.account)),
        (started_at, ">=", where.since),
        (queue, "=", clean(where.pool)),
        (consumer, "=", clean(where.consumer)),
    ]
    terms = []
    for name, sign, value in asked:
        if value is not None:
            values.append(value)
            terms.append(f"AND {name} {sign} ${len(values)}")
    return " ".join(terms)


def _to_run(row: Sequence[Any]) -> DeviceRun:
    device, account, consumer, task, attempt, started_at, finished_at, state, error = row
    read = None if error is None else _read_error(error)
    return DeviceRun(
        device=device,
        account=account or "",
        consumer=consumer,
        task=task,
        attempt=attempt,
        started_at=started_at,
        finished_at=finished_at,
        outcome=state,
        error="" if read is None else read.text,
    )
