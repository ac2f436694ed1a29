"""Log lines for a worker: readable, safe for a terminal, and silent where the app has set up its own logging."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from taskyard.cli.documents import Revealed
from taskyard.cli.text import clean, clock_time
from taskyard.errors import hide_password

STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}

STORY = "taskyard.worker"
"""The logger whose lines begin with what happened, and need no level."""


def set_up_logging(console: Console, *, verbose: bool) -> None:
    """Log to `console`, unless the app has given the root logger a handler of its own."""
    level = logging.INFO if verbose else logging.WARNING
    logging.getLogger("taskyard").setLevel(level)
    root = logging.getLogger()
    if root.handlers:
        return
    root.setLevel(level)
    handler = LineHandler(console)
    if verbose:
        # The story of every run tells of its failure as well.
        handler.addFilter(lambda record: not _is_task_failure(record))
    root.addHandler(handler)


class LineHandler(logging.Handler):
    """One line a record: time, level if it is worth mentioning, message, without the secrets of the task it is about. A
    failed task's traceback is left out: the store keeps it, and `taskyard show` prints it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            at = clock_time(datetime.fromtimestamp(record.created, UTC))
            style = STYLES.get(record.levelno, "")
            level = "" if record.levelno == logging.INFO or record.name == STORY else f"{record.levelname.lower()}  "
            hide = _hider(record)
            message = Text(clean(hide(record.getMessage())), style if record.name == STORY else "")
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
