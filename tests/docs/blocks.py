"""The blocks of a Markdown file, so that what the documents show is what the tests run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block; `mark` is the comment on the line before it, such as `run: app.py`."""

    mark: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name to save and run it under, if it is meant to be run."""
        return self.mark.removeprefix("run: ") if self.mark.startswith("run: ") else None


def blocks(path: Path) -> list[Block]:
    return [Block(m["mark"] or "", m["language"], m["text"]) for m in _BLOCK.finditer(path.read_text("utf-8"))]


def documents() -> list[Path]:
    """Every Markdown file a reader may come upon."""
    return sorted([*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")])
