"""Log lines for a worker: readable, safe for a terminal, and silent where the app has set up its own logging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from taskyard.cli.text import clean, clock_time, one_line
from taskyard.errors import hide_password
from taskyard.model.redaction import Redactor

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
        self._console, self._is_terminal = console, console.is_terminal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(_parts(record))
        except (SystemExit, BrokenPipeError):
            pass  # nobody reads the log any more, which rich tells by the former; the worker goes on
        except Exception:
            self.handleError(record)

    def _write(self, parts: Sequence[tuple[str, str]]) -> None:
        if self._is_terminal:
            self._console.print(Text.assemble(*parts), soft_wrap=True)
            return
        # Without rich, which takes 50 µs a line: all tasks of the worker wait meanwhile.
        print("".join(text for text, _ in parts), file=self._console.file, flush=True)


def _parts(record: logging.LogRecord) -> list[tuple[str, str]]:
    """The parts of a line, each with its style."""
    at = clock_time(datetime.fromtimestamp(record.created, UTC))
    style = STYLES.get(record.levelno, "")
    hide, run_line = _hider(record), getattr(record, "run_line", None)
    parts = [(f"{at}  ", "dim")]
    if run_line is not None:
        parts.append((one_line(hide(run_line), RUN_LINE_CHARS), style))
    else:
        parts.append(("" if record.levelno == logging.INFO else f"{record.levelname.lower()}  ", style))
        parts.append((clean(hide(record.getMessage())), ""))
    if record.exc_info and not _is_task_failure(record):
        trace = logging.Formatter().formatException(record.exc_info)
        parts.append(("\n" + clean(hide(trace), lines=True), "dim"))
    return parts


def _is_task_failure(record: logging.LogRecord) -> bool:
    return getattr(record, "is_task_failure", False)


def _hider(record: logging.LogRecord) -> Callable[[str], str]:
    task = getattr(record, "task_record", None)
    return hide_password if task is None else Redactor(task).text
