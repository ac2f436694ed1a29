"""Which tasks a command is for: those that are named, or all that match; and the options that say so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from taskyard.cli.errors import UsageError, typed_on_the_command_line
from taskyard.cli.options import AppOption, JsonOption, StoreOption
from taskyard.cli.session import Target
from taskyard.cli.values import parse_duration, parse_option, parse_pairs, parse_states
from taskyard.errors import quote
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter


@dataclass(frozen=True, slots=True)
class Selection:
    """What the options say: ids, or a filter. `states` is None where none was named: then those are meant that the
    command can do something with."""

    target: Target
    as_json: bool = False
    ids: Sequence[str] = ()
    where: TaskFilter | None = None
    states: tuple[TaskState, ...] | None = None
    dry_run: bool = False
    yes: bool = False


def make_selection(
    ids: Sequence[str] | None,
    *,
    everything: bool,
    state: Sequence[str] | None,
    older: str | None,
    newer: str | None,
    dry_run: bool,
    yes: bool,
    store: str | None,
    yard: str | None,
    as_json: bool,
    **filters: Any,
) -> Selection:
    """`filters` are fields of a `TaskFilter`."""
    labels = parse_pairs("--label", filters.pop("label", None) or ())
    narrows = any(value is not None for value in filters.values()) or bool(state or older or newer or labels)
    if everything == bool(ids):
        raise UsageError(
            "name tasks by their ids or say --all, not both"
            if ids
            else "no tasks given: pass task ids, or --all with a filter, for example --all --queue cpu"
        )
    if ids and (narrows or dry_run):
        raise UsageError("filters and --dry-run need --all; they cannot be combined with ids")
    now = datetime.now(UTC)
    before, since = _ago("older", older, now), _ago("newer", newer, now)
    with typed_on_the_command_line():
        where = TaskFilter(created_before=before, created_after=since, labels=labels, **filters)
    return Selection(
        Target(store, yard), as_json, ids or (), where if everything else None, parse_states(state or ()), dry_run, yes
    )


def _ago(field: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    try:
        return now - timedelta(seconds=parse_option(field, parse_duration, text))
    except OverflowError:
        raise UsageError(f"{quote(text)} is too long", field=field) from None


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "ids": (
        Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, or the ends or beginnings of them.")],
        None,
    ),
    "everything": (Annotated[bool, typer.Option("--all", help="All that match, instead of ids.")], False),
    "queue": (Annotated[str | None, typer.Option(help="With --all: only of this queue.")], None),
    "consumer": (Annotated[str | None, typer.Option(help="With --all: only of this consumer.")], None),
    "key": (Annotated[str | None, typer.Option(help="With --all: only with this key.")], None),
    "label": (
        Annotated[
            list[str] | None, typer.Option(metavar="NAME=TEXT", help="With --all: only with this label. Repeatable.")
        ],
        None,
    ),
    "blocker": (
        Annotated[
            str | None, typer.Option(metavar="KIND[:DETAIL]", help="With --all: only blocked by this: disk, disk:/data")
        ],
        None,
    ),
    "state": (
        Annotated[
            list[str] | None,
            typer.Option("--state", "-s", help="With --all: only in this state; else all that it fits. Repeatable."),
        ],
        None,
    ),
    "error": (
        Annotated[
            str | None, typer.Option(metavar="CLASS", help="With --all: only whose last error is a TimeoutError, …")
        ],
        None,
    ),
    "quarantined": (
        Annotated[
            bool | None,
            typer.Option(
                "--quarantined/--not-quarantined", help="With --all: only what took its workers down, or else."
            ),
        ],
        None,
    ),
    "older": (
        Annotated[str | None, typer.Option(metavar="TIME", help="With --all: submitted longer ago: 90, 5m, 2h, 1d.")],
        None,
    ),
    "newer": (Annotated[str | None, typer.Option(metavar="TIME", help="With --all: submitted since then.")], None),
    "dry_run": (Annotated[bool, typer.Option("--dry-run", help="With --all: only count them.")], False),
    "yes": (Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, however many they are.")], False),
    "store": (StoreOption, None),
    "yard": (AppOption, None),
    "as_json": (JsonOption, False),
}


def selecting(command: Callable[..., int]) -> Callable[..., int]:
    """A command with one parameter, `chosen`, as a command with all the options that choose tasks. Ids come before its
    own arguments, which come before the options."""
    own = [one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != "chosen"]
    asked = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]

    @functools.wraps(command)
    def call(**given: Any) -> int:
        rest = {one.name: given.pop(one.name) for one in own}
        return command(make_selection(**given), **rest)

    ours = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    call.__signature__ = inspect.Signature([asked[0], *ours, *asked[1:]])  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in (*asked, *ours)}
    return call
