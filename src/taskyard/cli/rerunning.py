"""`taskyard run-again`: new tasks made of ended ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.text import Text

from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED, AmbiguousTask, UsageError, error_document
from taskyard.cli.looks import state_text
from taskyard.cli.target import Target, opened, resolve
from taskyard.cli.text import clean
from taskyard.cli.values import Arguments, parse_arguments
from taskyard.errors import CommandRefused, InvalidArguments, TaskyardError, UnknownConsumer, UnknownTask
from taskyard.model.task import TaskRecord
from taskyard.yard import Yard


async def run_again(target: Target, fragments: Sequence[str], changes: Sequence[str], *, as_json: bool) -> int:
    """Submit each again; 1 if any was refused. With changes the consumer is needed, to check them."""
    if changes and target.app_name is None:
        raise UsageError("changed arguments are checked by the consumer; name the app with --app module:yard")
    given = parse_arguments(changes, None)
    answers: list[tuple[str, TaskRecord | TaskyardError]] = []
    async with opened(target.load() if changes else target.bare()) as yard:
        for fragment in dict.fromkeys(fragments):
            try:
                answers.append((fragment, await _run_one(yard, fragment, given)))
            except (CommandRefused, UnknownTask, UnknownConsumer, InvalidArguments, AmbiguousTask, UsageError) as exc:
                answers.append((fragment, exc))
    if as_json:
        say_json([_document(asked, answer) for asked, answer in answers])
    else:
        console = make_console()
        for _, answer in answers:
            console.print(_line(answer), soft_wrap=True)
    return REFUSED if any(isinstance(answer, TaskyardError) for _, answer in answers) else DONE


async def _run_one(yard: Yard, fragment: str, given: Arguments) -> TaskRecord:
    uuid = await resolve(yard, fragment)
    if not given.values:
        return await (await yard.run_again(uuid)).record()
    kept: dict[str, Any] = msgspec.json.decode((await yard.handle(uuid).record()).args)
    try:
        handle = await yard.run_again(uuid, kept | given.values)
    except InvalidArguments as refused:  # what the consumer refuses as JSON, it may take as the text that was typed
        handle = await yard.run_again(uuid, kept | given.as_text(refused.names))
    return await handle.record()


def _document(asked: str, answer: TaskRecord | TaskyardError) -> dict[str, Any]:
    if isinstance(answer, TaskyardError):
        return {"ok": False, "asked": asked, **error_document(answer)}
    return {"ok": True, "asked": asked, "uuid": answer.uuid, "origin": answer.origin, "state": answer.state}


def _line(answer: TaskRecord | TaskyardError) -> Text:
    if isinstance(answer, TaskyardError):
        return Text.assemble(("✘ refused  ", "bold red"), clean(str(answer)))
    line = Text.assemble(clean(answer.uuid), "  ", (clean(answer.source), "bold"), "  ", state_text(answer.state))
    return line.append(f"; a new task, made of {clean(answer.origin or '')}", "dim")
