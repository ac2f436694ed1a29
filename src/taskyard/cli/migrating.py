"""`taskyard migrate`: brings the tables of a store to the version of this program, or only checks them."""

from __future__ import annotations

from rich.text import Text

from taskyard.application.opening import describe_store
from taskyard.application.schema import SchemaDocument, migrate, schema_status
from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.session import Target, note_if_slow
from taskyard.cli.text import clean


async def migrate_store(target: Target, *, check: bool, as_json: bool) -> int:
    found = target.find_yard()
    schema = await (schema_status(found.yard) if check else note_if_slow(found, migrate(found.yard)))
    if as_json:
        say_json(schema)
    else:
        name = clean(describe_store(found.yard))
        make_console().print(Text.assemble(name, "  ", *_line(schema)), soft_wrap=True)
    return REFUSED if schema.pending else DONE


def _line(schema: SchemaDocument) -> tuple[tuple[str, str], ...]:
    names, is_behind = ", ".join(schema.pending or schema.applied), schema.before < schema.newest
    if schema.pending:
        behind = f", behind {schema.newest}" if is_behind else ""
        return (f"schema {schema.before}{behind}", "yellow"), (f"; to be applied: {names}", "")
    if not schema.applied:
        return ((f"✔ schema {schema.after}, up to date", "green"),)
    arrow = f" → {schema.newest}" if is_behind else ", updated"  # else only the bundle is older
    return (f"✔ schema {schema.before}{arrow}", "green"), (f"  ({names})", "dim")
