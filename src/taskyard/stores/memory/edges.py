"""Who waits for whom, in memory, by ids."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Edges:
    """An edge is open until the end of the task that is waited for has been told to the one that waits. It is kept
    until that one is forgotten: who sends it again has to know what it waits for. `open` says who has not been told of
    whom, by the one that is waited for; `children` who waits, or has waited, for whom."""

    def __init__(self) -> None:
        self.open: dict[int, set[int]] = {}
        self.children: dict[int, set[int]] = {}
        self._parents: dict[int, dict[int, None]] = {}

    def add(self, child: int, parent: int, *, is_open: bool) -> None:
        self._parents.setdefault(child, {})[parent] = None
        self.children.setdefault(parent, set()).add(child)
        if is_open:
            self.open.setdefault(parent, set()).add(child)

    def close(self, child: int, parent: int) -> None:
        _remove(child, self.open, parent)

    def parents(self, child: int) -> Iterable[int]:
        return sorted(self._parents.get(child, ()))

    def waiting_for(self, parent: int, at_most: int) -> list[int]:
        """The first of those that have not been told."""
        return heapq.nsmallest(at_most, self.open.get(parent, ()))

    def forget(self, child: int) -> None:
        for parent in self._parents.pop(child, ()):
            self.close(child, parent)
            _remove(child, self.children, parent)


def _remove(child: int, of: dict[int, set[int]], parent: int) -> None:
    children = of.get(parent)
    if children is not None:
        children.discard(child)
        if not children:
            del of[parent]
