"""`taskyard why`: why a task waits, and why the tasks in its way do; or the reasons of many, added up."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskyard.application.queue_order_documents import WaitGroup, WaitSummary
from taskyard.application.task_documents import ChainLink
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.errors import UsageError
from taskyard.cli.formatting import state_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, counted, moment, short_id
from taskyard.model.blocker import Blocker, split_key
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.model.why import Reason

NAMED_GROUPS = 4
"""Groups that the first line names."""


async def explain(target: Target, ref: str, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        chain = await application.tasks.explain(ref)
    if as_json:
        say_json(chain)
        return 0
    parts: list[RenderableType] = []
    for link in chain:
        parts += [*([Text()] if parts else []), _head(link), Padding(_facts(link), (0, 0, 0, 2))]
    show(make_console(), Group(*parts))
    return 0


def _head(link: ChainLink) -> Text:
    return Text.assemble((clean(link.consumer), "bold"), "  ", clean(link.uuid), "  ", state_text(link.state))


def _facts(link: ChainLink) -> RenderableType:
    why = link.why
    if why is None:
        return Text(f"it does not wait: it is {link.state}", "dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("why", clean(why.text)),
        ("since", moment(why.since)),
        ("until", moment(why.until)),
        ("remedy", clean(why.remedy)),
    ):
        if value:
            table.add_row(name, Text(value))
    return table


# --- many -------------------------------------------------------------------------------------------------------------


def check_choice(task: str | None, where: TaskFilter, *, everything: bool) -> bool:
    """Whether many are meant: all, or those that match."""
    many = everything or where != ALL_TASKS
    if many == (task is not None):
        raise UsageError(
            "name one task by its id, or choose many with --queue, --all and the like, not both"
            if many
            else "which task? give its id; or --queue NAME or --all for the reasons of many, added up"
        )
    return many


async def explain_many(target: Target, where: TaskFilter, *, limit: int, as_json: bool) -> int:
    async with opened_application(target) as application:
        summary = await application.tasks.explain_all(where, limit=limit)
    if as_json:
        say_json(summary)
    else:
        show(make_console(), Group(*_many(summary)))
    return 0


def _many(summary: WaitSummary) -> Iterator[RenderableType]:
    if not summary.groups:
        yield Text(clean(summary.no_match) or "no task that matches waits", "dim")
        return
    yield _totals(summary)
    if summary.is_sampled:
        yield Text(f"estimated from {counted(summary.explained, 'task')}, drawn from all of them", "dim")
    for group in summary.groups:
        yield Text()
        yield _group(group, is_sampled=summary.is_sampled)
    if summary.more_groups:
        yield Text()
        yield Text(f"{counted(summary.more_groups, 'smaller group')} more: --limit shows them", "dim")


def _totals(summary: WaitSummary) -> Text:
    """`11 wait: 9 behind key '8841', 2 for disk /data`."""
    named = [f"{group.count:,} {_phrase(group)}" for group in summary.groups[:NAMED_GROUPS]]
    rest = len(summary.groups) + summary.more_groups - len(named)
    more = f", {counted(rest, 'other reason')}" if rest else ""
    return Text.assemble((f"{summary.total:,} wait", "bold"), f": {', '.join(named)}{more}")


def _group(group: WaitGroup, *, is_sampled: bool) -> RenderableType:
    other, text = group.blocking_task, clean(group.text)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, justify="right", style="bold", min_width=6)
    table.add_column(overflow="fold")
    table.add_row(f"{'~' if is_sampled else ''}{group.count:,}", Text(_phrase(group), "bold"))
    table.add_row("", Text(text if other is None else text.replace(other, short_id(other)), "dim"))
    command = clean(group.command if other is None else group.command.replace(other, short_id(other)))
    if group.count == 1:
        command = command.replace(group.uuid, short_id(group.uuid))
    remedy = Text.assemble("→ ", clean(group.remedy))
    table.add_row("", remedy.append(": ").append(command, "green") if command else remedy)
    return table


_PHRASES: dict[Reason, str] = {
    Reason.HELD: "held by {subject}",
    Reason.SCHEDULED: "for their time",
    Reason.BACKOFF: "to be tried again after {subject}",
    Reason.DEPENDENCY: "for task {subject}",
    Reason.BLOCKED: "for {subject}",
    Reason.NO_PLACE: "for a place that no worker has: {subject}",
    Reason.PLACES_BUSY: "for a place: {subject}",
    Reason.NO_DEVICE: "for a device that the pool does not have: {subject}",
    Reason.DEVICES_BUSY: "for a device of pool {subject}",
    Reason.QUEUE_PAUSED: "for queue {queue!r} to be resumed",
    Reason.NO_NODE: "for a worker of {subject!r}",
    Reason.KEY_BUSY: "behind key {subject!r}",
    Reason.HEAD_OF_LINE: "behind the head of bucket {subject!r} of queue {queue!r}",
    Reason.QUEUE_FULL: "for a slot of queue {queue!r}",
    Reason.CONSUMER_FULL: "for room on the workers of {subject!r}",
    Reason.EXECUTOR_FULL: "for room in executor {subject!r}",
    Reason.NODES_FULL: "for room on the workers of {subject!r}",
    Reason.TURN: "for their turn in queue {queue!r}",
}
"""What a group waits for, after its number."""

_WITHOUT_SUBJECT: dict[Reason, str] = {
    Reason.HELD: "held",
    Reason.BACKOFF: "to be tried again",
    Reason.DEPENDENCY: "for tasks that have just ended",
    Reason.HEAD_OF_LINE: "behind the head of queue {queue!r}",
}


def _phrase(group: WaitGroup) -> str:
    subject = group.subject
    if group.reason is Reason.DEPENDENCY:
        subject = short_id(subject)
    elif group.reason is Reason.BLOCKED:
        subject = Blocker(*split_key(subject)).label
    text = _PHRASES.get(group.reason, str(group.reason))
    if not subject:
        text = _WITHOUT_SUBJECT.get(group.reason, text)
    return text.format(subject=clean(subject), queue=clean(group.queue))
