"""Of which version a store is, and whether this Taskyard fits it."""

from __future__ import annotations

from taskyard.cli.doctor.finding import Finding, problem
from taskyard.errors import StoreMigrationChanged, StoreTooNew
from taskyard.ports.store import Schema


def describe_schema(found: Schema) -> Finding:
    text = f"version {found.version}"
    if found.pending:
        text += f"; `taskyard migrate`, or whoever opens it next, applies {', '.join(found.pending)}"
    return Finding("schema", text, data={"schema": found.version, "newest": found.newest})


def describe_refusal(error: StoreTooNew | StoreMigrationChanged) -> Finding:
    """The store cannot be opened by this Taskyard."""
    if isinstance(error, StoreTooNew):
        kind = "" if error.what == "schema" else f"{error.what} "
        text = f"{kind}version {error.found}, while this Taskyard knows up to {error.supported}"
        return problem("schema", text, "upgrade Taskyard here; nothing was changed", schema=error.found)
    text = f"the store was made with another text of {error.changed} than this Taskyard has"
    return problem("schema", text, "install the Taskyard that made it, or a later release; nothing was changed")
