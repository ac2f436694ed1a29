"""Log lines for a worker: readable, safe for a terminal, and silent where the app has set up its own logging."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from taskyard.cli.documents import Revealed
from taskyard.cli.text import clean, clock_time, one_line
from taskyard.errors import hide_password

STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}

RUN_LINE_CHARS = 300
"""Characters of a line about a run: the store keeps the whole error."""


def set_up_logging(console: Console, *, verbose: bool) -> None:
    """Log to `console`, unless the app has given the root logger a handler of its own."""
    level = logging.INFO if verbose else logging.WARNING
    logging.getLogger("taskyard").setLevel(level)
    root = logging.getLogger()
    if root.handlers:
        return
    root.setLevel(level)
    root.addHandler(LineHandler(console))


class LineHandler(logging.Handler):
    """One line a record: time, level if it is worth mentioning, message, without the secrets of the task it is about. A
    line about a run begins with what happened, in place of a level. A failed task's traceback is left out: the store
    keeps it, and `taskyard show` prints it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            at = clock_time(datetime.fromtimestamp(record.created, UTC))
            style = STYLES.get(record.levelno, "")
            hide, run_line = _hider(record), getattr(record, "run_line", None)
            if run_line is None:
                level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}  "
                message = Text(clean(hide(record.getMessage())))
            else:
                level, message = "", Text(one_line(hide(run_line), RUN_LINE_CHARS), style)
            line = Text.assemble((f"{at}  ", "dim"), (level, style), message)
            if record.exc_info and not _is_task_failure(record):
                trace = logging.Formatter().formatException(record.exc_info)
                line.append("\n" + clean(hide(trace), lines=True), "dim")
            self._console.print(line, soft_wrap=True)
        except SystemExit:
            pass  # so rich takes it that nobody reads on; whoever logs goes on
        except Exception:
            self.handleError(record)


def _is_task_failure(record: logging.LogRecord) -> bool:
    return getattr(record, "is_task_failure", False)


def _hider(record: logging.LogRecord) -> Callable[[str], str]:
    task = getattr(record, "task_record", None)
    return hide_password if task is None else Revealed(task).text
