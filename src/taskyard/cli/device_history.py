"""`taskyard device history`, `accounts` and `release`: how runs on devices ended, and accounts that are quarantined."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.device_documents import (
    DeviceHistory,
    DeviceRunDocument,
    QuarantinedAccountDocument,
    RunQuery,
    RunTallyDocument,
)
from taskyard.cli.console import LINE_WIDTH, make_console, say_json, show
from taskyard.cli.device_formatting import account_text, percent, rate_style
from taskyard.cli.errors import DONE
from taskyard.cli.formatting import STATE_STYLES
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, clean, counted, cut, duration, moment, one_line, seconds_between, short_id
from taskyard.model.state import TaskState


async def show_history(target: Target, where: RunQuery, *, before: str | None, limit: int, as_json: bool) -> int:
    async with opened_application(target) as application:
        history = await application.devices.history(where, before=before, limit=limit)
    if as_json:
        say_json(history)
        return DONE
    console = make_console(pipe_width=LINE_WIDTH)
    show(console, _history(history, where, limit, datetime.now(UTC)))
    if history.next is not None:
        make_console(stderr=True).print(Text(f"older: --before {history.next}", "dim"), soft_wrap=True)
    return DONE


def _history(history: DeviceHistory, where: RunQuery, limit: int, now: datetime) -> RenderableType:
    if not history.runs:
        return Text("no run on a device matches; runs are kept as long as their task", "dim")
    parts: list[RenderableType] = []
    # A sum over one device or account alone is shown all the same: it is what was asked for.
    if where.account is None or len(history.devices) > 1:
        parts += _tallies("DEVICE", history.devices, history.more_devices, limit, now)
    if len(where.devices) != 1 or len(history.accounts) > 1 or where.account is not None:
        parts += _tallies("ACCOUNT", history.accounts, history.more_accounts, limit, now)
    return Group(*parts, run_table(history.runs))


def _tallies(
    title: str, tallies: Sequence[RunTallyDocument], left_out: int, limit: int, now: datetime
) -> list[RenderableType]:
    if not tallies:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in (title, "SUCCESS", "RUNS", "FAILED", "INTERRUPTED", "CANCELED", "BUSY", "LAST"):
        table.add_column(name, no_wrap=True, justify="left" if name == title else "right")
    for one in tallies[:limit]:
        runs = one.completed + one.failed + one.interrupted + one.canceled
        name = clean(one.device) if one.device is not None else account_text(one.account)
        table.add_row(
            Text(cut(name, 28), "bold"),
            Text(percent(one.success_rate), rate_style(one.success_rate)),
            f"{runs:,}",
            *(Text(f"{n:,}", "" if n else "dim") for n in (one.failed, one.interrupted, one.canceled)),
            Text(duration(one.busy_s), "dim"),
            Text("" if one.last_at is None else f"{age(seconds_between(one.last_at, now))} ago", "dim"),
        )
    more = left_out + max(0, len(tallies) - limit)
    return [table, *([Text(f"… and {more:,} more", "dim")] if more else []), Text()]


def run_table(runs: Sequence[DeviceRunDocument], *, with_device: bool = True) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("STARTED", *(["DEVICE"] if with_device else []), "ACCOUNT", "TASK", "ENDED AS", "TOOK"):
        table.add_column(name, no_wrap=True, justify="right" if name == "TOOK" else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for run in runs:
        device = [Text(cut(clean(run.device), 20), "bold")] if with_device else []
        table.add_row(
            Text(moment(run.started_at)[5:19], "dim"),
            *device,
            Text(cut(account_text(run.account), 16)),
            Text.assemble(cut(clean(run.consumer), 14), (f" {short_id(run.task)}", "dim")),
            _outcome(run.outcome),
            Text("" if run.duration_s is None else duration(run.duration_s), "dim"),
            Text(one_line(run.error, 200), "red" if run.outcome == "failed" else "dim"),
        )
    return table


def _outcome(outcome: str) -> Text:
    symbol, style = STATE_STYLES[TaskState(outcome)]
    return Text(f"{symbol} {outcome}", style)


# --- accounts ---------------------------------------------------------------------------------------------------------


async def list_accounts(target: Target, pool: str | None, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        found = await application.devices.accounts(pool)
    if as_json:
        say_json(found)
    elif found:
        show(make_console(), _account_table(found, datetime.now(UTC)))
    else:
        show(make_console(), Text("no account is quarantined", "dim"))
    return DONE


def _account_table(accounts: Sequence[QuarantinedAccountDocument], now: datetime) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("ACCOUNT", "CONSUMER", "POOL", "FAILURES", "FOR", "BY"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("FAILURES", "FOR") else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in accounts:
        stamp = one.quarantined
        table.add_row(
            Text(cut(account_text(one.account), 24), "bold"),
            Text(cut(clean(one.consumer), 24)),
            Text(cut(clean(one.pool), 16), "dim"),
            Text(f"{one.failures:,}", "red"),
            Text(age(seconds_between(stamp.at, now)), "dim"),
            Text(cut(clean(stamp.actor), 20), "dim"),
            Text(one_line(stamp.reason, 200), "dim"),
        )
    return table


async def release_account(
    target: Target, account: int | str, consumer: str | None, pool: str | None, *, as_json: bool
) -> int:
    async with opened_application(target) as application:
        receipt = await application.devices.release(account, consumer=consumer, pool=pool)
    if as_json:
        say_json(receipt)
        return DONE
    consumers = ", ".join(clean(one.consumer) for one in receipt.released)
    text = f"  tasks of {consumers} are taken again ({counted(len(receipt.released), 'pair')} released)"
    make_console().print(Text.assemble((account_text(account), "bold"), (text, "dim")), soft_wrap=True)
    return DONE
