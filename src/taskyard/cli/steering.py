"""`taskyard cancel` and `taskyard retry`: the same command for each task named, and what became of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from taskyard.cli.console import make_console, say_json
from taskyard.cli.errors import DONE, REFUSED, AmbiguousTask, UsageError, error_document
from taskyard.cli.looks import state_text
from taskyard.cli.target import Target, opened, resolve
from taskyard.cli.text import clean
from taskyard.errors import CommandRefused, TaskyardError, UnknownTask
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.yard import Yard

Ask = Callable[[Yard, str], Awaitable[TaskRecord]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one task: its record after the command, or why it was refused."""

    asked: str
    record: TaskRecord | None = None
    refused: TaskyardError | None = None

    def document(self) -> dict[str, object]:
        if self.refused is not None:
            return {"ok": False, "asked": self.asked, **error_document(self.refused)}
        assert self.record is not None
        asked_to_stop = self.record.state is TaskState.RUNNING and self.record.cancel_asked_at is not None
        state = self.record.state
        return {"ok": True, "asked": self.asked, "uuid": self.record.uuid, "state": state, "stopping": asked_to_stop}


async def steer(target: Target, fragments: Sequence[str], ask: Ask, *, as_json: bool) -> int:
    """Carry out `ask` for each task; 1 if any was refused."""
    async with opened(target.bare()) as yard:
        answers = [await _ask_one(yard, fragment, ask) for fragment in dict.fromkeys(fragments)]
    if as_json:
        say_json([answer.document() for answer in answers])
    else:
        console = make_console()
        for answer in answers:
            console.print(_line(answer), soft_wrap=True)
    return REFUSED if any(answer.refused is not None for answer in answers) else DONE


async def _ask_one(yard: Yard, fragment: str, ask: Ask) -> Answer:
    """One that is refused does not keep the others from being asked; a store that fails does."""
    try:
        return Answer(fragment, record=await ask(yard, await resolve(yard, fragment)))
    except (CommandRefused, UnknownTask, AmbiguousTask, UsageError) as exc:
        return Answer(fragment, refused=exc)


def _line(answer: Answer) -> Text:
    record = answer.record
    if record is None:
        return Text.assemble(("✘ refused  ", "bold red"), clean(str(answer.refused)))
    line = Text.assemble(clean(record.uuid), "  ", (clean(record.source), "bold"), "  ", state_text(record.state))
    if record.state is TaskState.RUNNING:
        line.append("; its run was asked to stop, and it is canceled when it has", "dim")
    return line
