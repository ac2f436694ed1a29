"""The last write of an audit entry that a command for many tasks, or a submit, keeps while it runs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from taskyard.model.audit import AuditEntry

log = logging.getLogger("taskyard")


async def finish_audit(
    put: Callable[[AuditEntry], Awaitable[None]], entry: AuditEntry | None, *, is_finished: bool = True, **counts: Any
) -> None:
    """Write the counts of a command whose tasks are changed already. A failure is logged and not raised: a caller that
    gets an error asks again, and tasks would run twice. The entry stays as it was, not finished."""
    if entry is None:
        return
    try:
        await put(replace(entry, is_finished=is_finished, **counts))
    except Exception as error:
        log.warning("the audit entry %s of the command %s was not updated: %s", entry.uuid, entry.command, error)
