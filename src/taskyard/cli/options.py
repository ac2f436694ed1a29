"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from taskyard.cli.errors import UsageError, typed_on_the_command_line


def _check_reason(param: typer.CallbackParam, value: str) -> str:
    from taskyard.model.given import check_reason

    with typed_on_the_command_line():
        return check_reason(value, field=param.name or "")


def reason_option(kept_with: str) -> Any:
    """An option for what people say with a command."""
    return typer.Option(help=f"Why; kept with the {kept_with}.", callback=_check_reason)


def _refuse_empty(hint: str) -> Callable[[str | None], str | None]:
    """An empty variable in a script must not become another store, or app, than the one that was meant."""

    def check(value: str | None) -> str | None:
        if value == "":
            raise UsageError(hint)
        return value

    return check


_check_store = _refuse_empty("--store is empty; give an address such as sqlite:///work.db, or leave the option out")
_check_app = _refuse_empty("--app is empty; name a yard as module:yard, or leave the option out")
_check_yard = _refuse_empty("APP is empty; name the yard to run as module:yard")

LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="NAME=TEXT", help="Only with this label. Repeatable.")
]

BlockerOption = Annotated[
    str | None, typer.Option("--blocker", metavar="KIND[:DETAIL]", help="Only blocked by this: disk, disk:/data, …")
]

AppArgument = Annotated[
    str, typer.Argument(metavar="APP", help="The yard to run, as module:yard.", callback=_check_yard)
]
StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="As in sqlite:///work.db.", callback=_check_store)
]
AppOption = Annotated[
    str | None, typer.Option("--app", metavar="APP", help="The yard, as module:yard.", callback=_check_app)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A task's id, or the end or beginning of one.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids, or the ends or beginnings of them.")]
GraceOption = Annotated[str, typer.Option("--grace", metavar="TIME", help="How long a stop waits for what runs.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Tell of every run.")]
