"""Where output goes. Data is never taken for markup, and a pipe gets whole lines instead of what fits a window."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.cli.text import clean, clean_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 160
"""Columns when nobody sees a window: wide enough for a whole id and a whole message."""

_SURROGATE = re.compile("[\ud800-\udfff]")

LINE_WIDTH = 1_000
"""Columns of a table whose lines nobody wants to be cut, where nobody sees a window."""


def make_console(*, stderr: bool = False, pipe_width: int = PIPE_WIDTH) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else pipe_width
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)


def show(console: Console, what: RenderableType) -> None:
    """Print `what`; a pipe gets it without the spaces that fill up a window's lines."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=console.file, flush=True)


def say(text: str) -> None:
    """One line of plain text on standard output."""
    print(clean(text, lines=True), flush=True)


def say_json(value: Any, *, pretty: bool = True) -> None:
    """JSON on standard output: indented for people and pipes, or one value a line."""
    print(json_text(value, pretty=pretty), flush=True)


def json_text(value: Any, *, pretty: bool = True) -> str:
    try:
        raw = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # Somebody typed half of a character. It is written out: not every reader of JSON takes its escape.
        whole = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        raw = _SURROGATE.sub(lambda half: rf"\\u{ord(half[0]):x}", whole).encode()
    return clean_json((msgspec.json.format(raw, indent=2) if pretty else raw).decode())


def complain(kind: str, text: str) -> None:
    """One line on standard error: `error: …`, `note: …`."""
    from rich.text import Text

    style = "bold red" if kind == "error" else "yellow"
    console = make_console(stderr=True)
    console.print(Text.assemble((f"{kind}: ", style), clean(text)), soft_wrap=True)
