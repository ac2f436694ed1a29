"""`taskyard migrate`: the tables of a store, brought to the version of this program or only looked at."""

from __future__ import annotations

from rich.text import Text

from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED, NothingToMigrate, NotShared
from taskyard.cli.target import Target, describe_store, patiently, refuse_held
from taskyard.cli.text import clean
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import MigratingStore, Schema
from taskyard.settings import make_store


async def migrate_store(target: Target, *, check: bool, as_json: bool) -> int:
    yard = target.bare()
    name = describe_store(yard)
    if name == "memory://":
        raise NotShared
    store = make_store(yard.where, SystemClock()) if yard.where is None or isinstance(yard.where, str) else yard.where
    if not isinstance(store, MigratingStore):
        raise NothingToMigrate(name)
    if check:
        found = await store.schema()
    else:
        refuse_held(yard)
        found = await patiently(yard, store.migrate())
    if as_json:
        say_json(_document(found, is_done=not check))
    else:
        make_console().print(Text.assemble(clean(name), "  ", *_line(found, is_done=not check)), soft_wrap=True)
    return REFUSED if check and found.pending else DONE


def _document(found: Schema, *, is_done: bool) -> dict[str, object]:
    return {
        "before": found.version,
        "after": found.newest if is_done else found.version,
        "newest": found.newest,
        "applied": found.pending if is_done else (),
        "pending": () if is_done else found.pending,
    }


def _line(found: Schema, *, is_done: bool) -> tuple[tuple[str, str], ...]:
    if not found.pending:
        return ((f"✔ schema {found.version}, up to date", "green"),)
    names, is_behind = ", ".join(found.pending), found.version < found.newest  # else the bundle alone is older
    if is_done:
        arrow = f" → {found.newest}" if is_behind else ", updated"
        return (f"✔ schema {found.version}{arrow}", "green"), (f"  ({names})", "dim")
    behind = f", behind {found.newest}" if is_behind else ""
    return (f"schema {found.version}{behind}", "yellow"), (f"; to be applied: {names}", "")
