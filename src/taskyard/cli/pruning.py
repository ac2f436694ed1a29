"""`taskyard prune`: forgetting what ended long ago, now."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from rich.text import Text

from taskyard.application.task_requests import PruneReport
from taskyard.cli.asking import confirm
from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, UsageError
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import counted, duration


def prune(target: Target, *, older_s: float, dry_run: bool, yes: bool, as_json: bool) -> int:
    try:
        before = datetime.now(UTC) - timedelta(seconds=older_s)
    except OverflowError:
        raise UsageError("--older is too long") from None
    if not dry_run and not yes:
        found = asyncio.run(_prune(target, before, dry_run=True)).matched
        confirm(f"forget {counted(found, 'task')} for good", found, yes=False)
    report = asyncio.run(_prune(target, before, dry_run=dry_run))
    if as_json:
        say_json(report)
    else:
        what = f"{counted(report.matched, 'task')} that ended more than {duration(older_s)} ago"
        words = f"would forget {what}; nothing was changed" if dry_run else f"forgot {what}"
        make_console().print(Text(words), soft_wrap=True)
    return DONE


async def _prune(target: Target, before: datetime, *, dry_run: bool) -> PruneReport:
    async with opened_application(target) as application:
        return await application.tasks.prune(finished_before=before, dry_run=dry_run)
