"""`taskyard prune`: forgetting what ended long ago, now."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from rich.text import Text

from taskyard.cli.asking import confirm
from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, UsageError
from taskyard.cli.target import Target, opened
from taskyard.cli.text import counted, duration
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task_filter import TaskFilter

BATCH = 500


def prune(target: Target, *, older_s: float, dry_run: bool, yes: bool, as_json: bool) -> int:
    try:
        before = datetime.now(UTC) - timedelta(seconds=older_s)
    except OverflowError:
        raise UsageError("--older is longer ago than there are dates") from None
    found = asyncio.run(_count(target, before)) if dry_run or not yes else 0
    if not dry_run:
        confirm(f"forget {counted(found, 'task')} for good", found, yes=yes)
    pruned = 0 if dry_run else asyncio.run(_prune(target, before))
    if as_json:
        say_json({"matched": found if dry_run else pruned, "pruned": pruned, "before": before, "dry_run": dry_run})
    else:
        what = f"{counted(found if dry_run else pruned, 'task')} that ended more than {duration(older_s)} ago"
        words = f"would forget {what}; nothing was changed" if dry_run else f"forgot {what}"
        make_console().print(Text(words), soft_wrap=True)
    return DONE


async def _count(target: Target, before: datetime) -> int:
    where = TaskFilter(states=tuple(state for state in TaskState if state in ENDED), finished_before=before)
    async with opened(target.bare()) as yard:
        return await yard.matching(where).count()


async def _prune(target: Target, before: datetime) -> int:
    pruned = 0
    async with opened(target.bare()) as yard:
        while batch := await yard.store.prune(finished_before=before, limit=BATCH):
            pruned += batch
    return pruned
