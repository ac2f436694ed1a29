"""Who fires a schedule, of the nodes that could. It saves the others from doing the same work at the same moment, and
nothing depends on it: that a fire time becomes one task, however many believe that they lead, is the store's doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from taskyard.model.node import Node, NodeStatus
from taskyard.ports.store import Store


def find_leader(nodes: Sequence[NodeStatus], source: str) -> str | None:
    """The incarnation of the node that has been there longest, among those that serve `source`, or, if none says that
    it does, among all. One that has died leads until it is forgotten; others then fire a little later."""
    serving = [status.node for status in nodes if source in status.node.consumers]
    candidates = serving or [status.node for status in nodes]
    return min(candidates, key=_seniority).incarnation if candidates else None


def _seniority(node: Node) -> tuple[bool, datetime | None, str]:
    return node.started_at is None, node.started_at, node.incarnation


class Leadership:
    def __init__(self, store: Store, incarnation: Callable[[], str]) -> None:
        self._store, self._incarnation = store, incarnation

    async def look(self) -> Callable[[str], bool]:
        """Who is there now: an answer to the question whether this node leads for a source."""
        nodes = await self._store.nodes()
        return partial(self._leads, nodes)

    def _leads(self, nodes: Sequence[NodeStatus], source: str) -> bool:
        return find_leader(nodes, source) == self._incarnation()
