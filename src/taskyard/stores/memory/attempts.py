"""Log lines and artifacts of attempts, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from taskyard.model.attempt import LINES_KEPT, Artifact, AttemptArtifact, AttemptLine, LogLine


class AttemptOutputs:
    """What attempts leave behind, by task id and token. Most tasks have nothing here."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[int, dict[datetime, LogLine]]] = {}
        self._artifacts: dict[int, dict[int, dict[str, Artifact]]] = {}

    def add_lines(self, task: int, token: int, lines: Iterable[LogLine]) -> None:
        """Add those that are new, and keep the latest `LINES_KEPT`."""
        kept = self._lines.setdefault(task, {}).setdefault(token, {})
        for line in lines:
            kept.setdefault(line.at, line)
        if len(kept) > LINES_KEPT:
            for at in sorted(kept)[:-LINES_KEPT]:
                del kept[at]

    def add_artifacts(self, task: int, token: int, artifacts: Iterable[Artifact]) -> None:
        kept = self._artifacts.setdefault(task, {}).setdefault(token, {})
        kept.update({artifact.name: artifact for artifact in artifacts})

    def list_lines(self, task: int, token: int | None, limit: int) -> list[AttemptLine]:
        attempts = self._lines.get(task, {})
        lines = [
            AttemptLine(one, attempts[one][at])
            for one in sorted(attempts)
            if token in (None, one)
            for at in sorted(attempts[one])
        ]
        return lines[max(0, len(lines) - limit) :]

    def list_artifacts(self, task: int) -> list[AttemptArtifact]:
        attempts = self._artifacts.get(task, {})
        return [
            AttemptArtifact(token, msgspec.structs.replace(attempts[token][name], data=None))
            for token in sorted(attempts)
            for name in sorted(attempts[token])
        ]

    def find_artifact(self, task: int, token: int, name: str) -> Artifact | None:
        return self._artifacts.get(task, {}).get(token, {}).get(name)

    def forget_attempt(self, task: int, token: int) -> None:
        self._lines.get(task, {}).pop(token, None)
        self._artifacts.get(task, {}).pop(token, None)

    def forget(self, task: int) -> None:
        self._lines.pop(task, None)
        self._artifacts.pop(task, None)
