"""The commands `taskyard consumer` and `taskyard audit`, with their options."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from taskyard.cli.options import AppOption, JsonOption, StoreOption
from taskyard.cli.session import Target

consumers = typer.Typer(help="The consumers that workers serve.", no_args_is_help=True)


@consumers.callback()
def _group() -> None:
    """The consumers that workers serve."""


@consumers.command("ls")
def consumer_ls_command(store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False) -> int:
    """List the consumers that workers have published: queue, executor, version, nodes and arguments."""
    from taskyard.cli.consumers import list_consumers

    return asyncio.run(list_consumers(Target(store, yard), as_json=as_json))


def audit_command(
    *,
    by: Annotated[str | None, typer.Option("--by", metavar="WHO", help="Only by this person: ana, cli:ana.")] = None,
    command: Annotated[str | None, typer.Option("--command", metavar="WORD", help="Only this command.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="Only about this task.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Only about this queue.")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="Only about this device.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")] = 20,
    before: Annotated[int | None, typer.Option("--before", metavar="NUMBER", help="Only older entries.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """List what people asked for: who, when, what, why, and how many tasks were changed."""
    from taskyard.cli.audit import AuditRequest, show_audit

    request = AuditRequest(by=by, command=command, task=task, queue=queue, device=device, limit=limit, before=before)
    return asyncio.run(show_audit(Target(store, yard), request, as_json=as_json))
