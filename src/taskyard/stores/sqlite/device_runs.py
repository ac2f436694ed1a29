"""The history of devices in SQLite: attempts by the indexes of those that ran on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from taskyard.model.device import DeviceRun, RunFilter, RunTally
from taskyard.model.execution import ExecutionError
from taskyard.stores.records import document_reader, from_us, to_us

_read_error = document_reader(ExecutionError)

_ENDED_RUNS = (
    "SELECT r.token, r.task, r.device, task.key, task.consumer, task.uuid, r.attempt, r.started_at, r.finished_at, "
    "r.state, r.error FROM attempt AS r CROSS JOIN task ON task.id = r.task WHERE r.device IS NOT NULL"
)
_OPEN_RUNS = (
    "SELECT task.token, task.id, task.device, task.key, task.consumer, task.uuid, task.attempt, task.started_at, NULL, "
    "task.state, NULL FROM task INDEXED BY task_running WHERE task.state = 'running' AND task.device IS NOT NULL"
)
# An attempt that was cut short through no fault of device or node has no error, and is not counted.
_TALLY = (
    "SELECT {name}, sum(r.state = 'completed'), sum(r.state IN ('failed', 'retrying')), sum(r.state = 'interrupted'), "
    "sum(r.state = 'canceled'), sum(r.finished_at - r.started_at), max(r.finished_at) FROM attempt AS r {tasks} "
    "WHERE r.device IS NOT NULL AND NOT (r.state = 'interrupted' AND r.error IS NULL) {terms} GROUP BY 1 ORDER BY 1"
)


def list_runs(
    conn: apsw.Connection, where: RunFilter, limit: int, before: tuple[int, int] | None
) -> list[tuple[tuple[int, int], DeviceRun]]:
    # Tokens grow from claim to claim, over all tasks.
    newest = (1 << 62) if before is None else before[0]
    ended, values = _terms(where, run="r.", account="r.account")
    running, _ = _terms(where, run="task.", account="task.key")
    rows: Any = conn.execute(
        f"SELECT * FROM (SELECT * FROM ({_ENDED_RUNS} AND r.token < ? {ended} ORDER BY r.token DESC LIMIT ?) "
        f"UNION ALL {_OPEN_RUNS} AND task.token < ? {running}) ORDER BY token DESC LIMIT ?",
        (newest, *values, limit, newest, *values, limit),
    )
    return [((token, task), _to_run(run)) for token, task, *run in rows]


def tally_runs(conn: apsw.Connection, where: RunFilter, by_account: bool) -> list[RunTally]:
    terms, values = _terms(where, run="r.", account="r.account")
    needs_tasks = where.pool is not None or where.consumer is not None
    sql = _TALLY.format(
        name="r.account" if by_account else "r.device",
        tasks="CROSS JOIN task ON task.id = r.task" if needs_tasks else "",
        terms=f"{terms} AND r.account IS NOT NULL" if by_account else terms,
    )
    rows: Any = conn.execute(sql, tuple(values))
    return [
        RunTally(
            name=name,
            completed=completed,
            failed=failed,
            interrupted=interrupted,
            canceled=canceled,
            busy_s=busy / 1e6,
            last_at=from_us(last),
        )
        for name, completed, failed, interrupted, canceled, busy, last in rows
    ]


def _terms(where: RunFilter, *, run: str, account: str) -> tuple[str, list[Any]]:
    """What a filter asks, and its values, by the names that the columns of a run have."""
    asked = [
        ("task.queue", "=", where.pool),
        (f"{run}device", "=", where.device),
        (account, "=", where.account),
        ("task.consumer", "=", where.consumer),
        (f"{run}started_at", ">=", None if where.since is None else to_us(where.since)),
    ]
    given = [(f"AND {name} {sign} ?", value) for name, sign, value in asked if value is not None]
    return " ".join(term for term, _ in given), [value for _, value in given]


def _to_run(row: Sequence[Any]) -> DeviceRun:
    device, account, consumer, task, attempt, started_at, finished_at, state, error = row
    read = None if error is None else _read_error(error)
    return DeviceRun(
        device=device,
        account=account or "",
        consumer=consumer,
        task=task,
        attempt=attempt,
        started_at=from_us(started_at),
        finished_at=None if finished_at is None else from_us(finished_at),
        outcome=state,
        error="" if read is None else read.text,
    )
