"""The visit: everything is looked at, as far as it can be; what cannot be opened is reported, never raised."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import apsw
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.doctor.budget import budget
from taskyard.cli.doctor.file import damaged, integrity, opened_read_only, schema, sizes
from taskyard.cli.doctor.finding import Finding, Level, problem, warning
from taskyard.cli.doctor.machine import file_system, permissions, room, versions
from taskyard.cli.doctor.traffic import Traffic
from taskyard.cli.doctor.turn import turn
from taskyard.cli.errors import DONE, REFUSED, NoStoreGiven
from taskyard.cli.target import Target, describe_store, store_path
from taskyard.cli.text import clean, counted
from taskyard.errors import StoreError
from taskyard.settings import POSTGRES, find_store_url
from taskyard.stores.sqlite.place import check_place, to_store_error
from taskyard.yard import Yard

LOOKS = {Level.OK: ("✔", "green"), Level.WARNING: ("!", "yellow"), Level.PROBLEM: ("✘", "bold red")}


def examine(target: Target, *, as_json: bool) -> int:
    """1 if there is a problem; a warning alone is none."""
    findings = [*versions(), *budget(os.environ), *_store(target)]
    sick = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        say_json({"ok": not sick, "findings": [finding.document() for finding in findings]})
    else:
        show(make_console(), draw(findings))
    return REFUSED if sick else DONE


def _store(target: Target) -> Iterator[Finding]:
    url = find_store_url(target.store)
    if url is None and target.app_name is None:
        yield Finding("store", f"none examined; {NoStoreGiven()}")
        return
    yard = Yard(url) if url is not None else target.load()
    yield Finding("store", describe_store(yard), data={"url": describe_store(yard)})
    path, where = store_path(yard), yard.where or find_store_url(None)
    if path is not None:
        yield from _place(path)
    elif isinstance(where, str) and where.startswith(POSTGRES):
        yield from _server(where)
    else:
        yield _out_of_reach(describe_store(yard))


def _server(url: str) -> list[Finding]:
    try:
        from taskyard.cli.doctor.server import server
    except ModuleNotFoundError as exc:
        if exc.name != "asyncpg":
            raise
        advice = "install it: pip install 'taskyard[postgres]'"
        return [problem("server", "the driver for PostgreSQL is missing here", advice)]

    async def examined() -> list[Finding]:
        return [finding async for finding in server(url)]

    return asyncio.run(examined())


def _out_of_reach(store: str) -> Finding:
    if store != "memory://":
        return Finding(
            "file", "neither a SQLite file nor a PostgreSQL database: there is nothing to examine from outside"
        )
    return warning(
        "file",
        "none: a store in memory lives only inside its own process, so there is nothing to examine",
        "use a file, such as sqlite:///work.db, for what other processes should see",
    )


def _place(path: Path) -> Iterator[Finding]:
    try:
        check_place(path)
    except StoreError as error:
        yield problem("file", str(error), "correct the address, or what is there")
        return
    yield from file_system(path)
    yield from room(path.parent)
    if not path.exists():
        yield problem("file", f"there is no file {path}", "correct the address; the first `taskyard run` makes it")
        return
    yield from permissions(path)
    yield from sizes(path)
    try:
        with opened_read_only(path) as conn:
            yield from _inside(path, conn)
    except (apsw.NotADBError, apsw.CorruptError) as exc:
        yield damaged(path, str(exc))
    except apsw.Error as exc:
        yield problem("open", str(to_store_error(path, exc)), "see the other findings")


def _inside(path: Path, conn: apsw.Connection) -> Iterator[Finding]:
    found = list(schema(path, conn))
    yield from found
    if any(finding.level is Level.PROBLEM for finding in found) or "schema" not in found[-1].data:
        return
    checked = list(integrity(path, conn))
    yield from checked
    yield from turn(path, conn)
    if any(finding.level is Level.PROBLEM for finding in checked):
        return  # what else a damaged file says is not to be trusted
    if found[-1].data["schema"] != found[-1].data["newest"]:
        yield Finding("tasks", "not looked at: the tables are those of an earlier version")
        return
    traffic = Traffic(path, conn)
    yield from traffic.nodes()
    yield from traffic.tasks()


def draw(findings: Sequence[Finding]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        symbol, style = LOOKS[finding.level]
        text = Text(clean(finding.text), "" if finding.level is Level.OK else style)
        if finding.advice:
            text.append(f"\n→ {clean(finding.advice)}", "default")
        table.add_row(Text(symbol, style), Text(finding.topic, "dim"), text)
    return Group(table, Text(), _verdict(findings))


def _verdict(findings: Sequence[Finding]) -> Text:
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if problems:
        return Text(f"{counted(problems, 'problem')} to solve", "bold red")
    if warnings:
        return Text(f"nothing is broken; {counted(warnings, 'thing')} to look at", "yellow")
    return Text("everything looks well", "green")
