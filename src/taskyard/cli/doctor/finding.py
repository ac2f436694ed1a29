"""One thing the doctor has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """A warning is worth a look; a problem keeps work from being done, or soon will."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`topic` is short, `text` says what was found, `advice` what to do. `data` is for programs."""

    topic: str
    text: str
    level: Level = Level.OK
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "topic": self.topic, "level": self.level, "text": self.text, "advice": self.advice or None, **self.data,
        }  # fmt: skip


def warning(topic: str, text: str, advice: str, **data: Any) -> Finding:
    return Finding(topic, text, Level.WARNING, advice, data)


def problem(topic: str, text: str, advice: str, **data: Any) -> Finding:
    return Finding(topic, text, Level.PROBLEM, advice, data)
