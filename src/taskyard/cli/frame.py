"""One frame of the live view, for any width and height."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from taskyard.application.overview_documents import OverviewDocument
from taskyard.application.task_documents import TaskDocument
from taskyard.cli.formatting import counts_text, due_text, elapsed, error_text, rate_text, state_symbol, summary_text
from taskyard.cli.text import clean, counted, cut, cut_start, duration, one_line, short_id, time_text
from taskyard.model.state import WAITING_FOR_TIME, TaskState

SOURCE_WIDTH = 12
FINISHED_ROWS, WAITING_ROWS = 10, 5


class Frame:
    """`title` is what the view is of. Sections get the lines they need, the running tasks first."""

    def __init__(self, seen: OverviewDocument, *, title: str, width: int, height: int, now: datetime) -> None:
        self._seen, self._title, self._now = seen, title, now
        self._width, self._left = width, height

    def draw(self, *, above: Iterable[RenderableType] = (), lines_above: int = 0) -> RenderableType:
        """The frame below whatever else is to be shown; `lines_above` is the room that takes."""
        self._left -= lines_above
        parts: list[RenderableType] = [*above, *self._head()]
        self._left -= len(parts)
        parts += self._section("RUNNING", self._seen.running, self._running_table)
        parts += self._next()
        parts += self._section("WAITING FOR THEIR TIME", self._seen.waiting, self._waiting_table, at_most=WAITING_ROWS)
        parts += self._queues()
        parts += self._section(
            "JUST FINISHED", self._seen.finished[: min(FINISHED_ROWS, self._left - 2)], self._finished_table
        )
        return Group(*parts)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _head(self) -> Iterator[RenderableType]:
        seen = self._seen
        nodes = counted(seen.workers, "worker") if seen.workers else "no worker is running"
        clock = self._now.astimezone().strftime("%H:%M:%S")
        right = Text(f"{seen.rate:.1f} tasks/s · {nodes} · {clock}", "dim")
        title = cut_start(clean(self._title), max(10, self._width - right.cell_len - 14))
        left = Text.assemble(("Taskyard", "bold"), ("  ", ""), (title, "dim"))
        yield self._apart(left, right)
        yield counts_text(seen.counts)

    def _apart(self, left: Text, right: Text) -> Table:
        grid = Table.grid(expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(left, right)
        return grid

    def _section(
        self,
        title: str,
        tasks: Sequence[TaskDocument],
        draw: Callable[[Sequence[TaskDocument]], Table],
        *,
        at_most: int = 100,
    ) -> Iterator[RenderableType]:
        room = min(at_most, self._left - 2)
        if not tasks or room < 2:
            return
        more = len(tasks) > room
        shown = tasks[: room - 1] if more else tasks
        self._left -= 2 + len(shown) + more
        yield Text(f"\n{title}", "dim")
        yield draw(shown)
        if more:
            yield Text(f"  … and {len(tasks) - len(shown)} more", "dim")

    def _running_table(self, tasks: Sequence[TaskDocument]) -> Table:
        bar = max(8, min(40, self._width - 62))
        room = max(8, self._width - bar - 2 - SOURCE_WIDTH - 1 - 9 - 2 - 6 - 9)
        table = self._grid(SOURCE_WIDTH, 8, bar, 5, room)
        for task in tasks:
            progress = task.progress
            fraction = progress.fraction if progress is not None else None
            message = one_line(progress.message, room) if progress is not None else ""
            if progress is not None and progress.rate is not None:
                rate = rate_text(progress.rate)
                message = f"{cut(message, room - len(rate) - 1)} {rate}".strip()
            if task.cancel is not None:
                message = "stopping"
            table.add_row(
                state_symbol(task.state),
                *self._who(task),
                ProgressBar(total=1.0, completed=fraction or 0.0, width=bar, complete_style="bright_blue"),
                Text("" if fraction is None else f"{fraction * 100:.0f} %", "bold", justify="right"),
                Text(message),
                Text(duration(elapsed(task, self._now)), "dim"),
            )
        return table

    def _next(self) -> Iterator[RenderableType]:
        """The tasks that start next. Those that are watched by their ids are among those that wait."""
        watched = {task.uuid for task in self._seen.waiting}
        tasks = [one for one in self._seen.next if one.uuid not in watched][: self._left - 3]
        if not tasks:
            return
        self._left -= 2 + len(tasks)
        table = self._grid(SOURCE_WIDTH, 8, 8, 14, max(8, self._width - 2 - SOURCE_WIDTH - 1 - 9 - 9 - 15))
        for one in tasks:
            who = Text(cut(clean(one.consumer), SOURCE_WIDTH), "bold"), Text(short_id(one.uuid), "dim")
            starts = time_text(one.expected_start_at, self._now)
            place = f"{one.place:,} of {one.waiting:,} in {clean(one.queue)}"
            priority = "" if one.priority == "normal" else one.priority
            table.add_row(state_symbol(TaskState.QUEUED), *who, Text(priority), Text(starts), Text(place, "dim"))
        yield Text("\nNEXT", "dim")
        yield table

    def _waiting_table(self, tasks: Sequence[TaskDocument]) -> Table:
        room = max(8, self._width - 2 - SOURCE_WIDTH - 1 - 9 - 22)
        table = self._grid(SOURCE_WIDTH, 8, 20, room)
        for task in tasks:
            why = "" if task.error is None else one_line(error_text(task.error), room)
            due = due_text(task, self._now) if task.state in WAITING_FOR_TIME else self._place_text(task)
            table.add_row(state_symbol(task.state), *self._who(task), Text(due), Text(why, "dim"))
        return table

    def _place_text(self, task: TaskDocument) -> str:
        """`3 of 14, in 12 s`."""
        found = next((one for one in self._seen.next if one.uuid == task.uuid), None)
        if found is None:
            return str(task.state)
        starts = time_text(found.expected_start_at, self._now)
        return f"{found.place:,} of {found.waiting:,}{f', {starts}' if starts else ''}"

    def _finished_table(self, tasks: Sequence[TaskDocument]) -> Table:
        room = max(8, self._width - 2 - SOURCE_WIDTH - 1 - 9 - 9)
        table = self._grid(SOURCE_WIDTH, 8, 8, room)
        for task in tasks:
            took = Text(duration(elapsed(task, self._now)) if task.started_at else "", "dim", justify="right")
            table.add_row(state_symbol(task.state), *self._who(task), took, summary_text(task, self._now, room))
        return table

    def _queues(self) -> Iterator[RenderableType]:
        """One line for each queue, when there are several; finished tasks are not counted here."""
        queues = [(name, n) for name, counts in self._seen.queues.items() if any(n := _open(counts))]
        if len(queues) < 2 or self._left < 6:
            return
        shown = queues[:4]
        self._left -= 2 + len(shown)
        yield Text("\nQUEUES", "dim")
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, (running, queued, later) in shown:
            table.add_row(
                Text(f"  {cut(clean(name), 16)}", "bold"),
                *(
                    Text(f"{n:,} {word}", "" if n else "dim")
                    for n, word in ((running, "running"), (queued, "queued"), (later, "later"))
                ),
            )
        yield table

    # --- cells --------------------------------------------------------------------------------------------------------

    def _grid(self, *widths: int) -> Table:
        """A sign first, then columns of these widths; what comes after takes what it needs."""
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(width=1)
        for width in widths:
            table.add_column(width=width, no_wrap=True, overflow="ellipsis")
        return table

    def _who(self, task: TaskDocument) -> tuple[Text, Text]:
        return Text(cut(clean(task.consumer), SOURCE_WIDTH), "bold"), Text(short_id(task.uuid), "dim")


def _open(counts: Mapping[TaskState, int]) -> tuple[int, int, int]:
    """How many run, wait for a slot, and wait for something else."""
    later = sum(counts.get(state, 0) for state in (TaskState.SCHEDULED, TaskState.RETRYING, TaskState.BLOCKED))
    return counts.get(TaskState.RUNNING, 0), counts.get(TaskState.QUEUED, 0), later
