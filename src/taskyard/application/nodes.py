"""Nodes: the processes that run tasks on a store, and taking one out of service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

import msgspec

from taskyard.application.calls import YardContext
from taskyard.application.errors import AmbiguousNode
from taskyard.application.node_documents import DrainReceipt, NodeDocument
from taskyard.errors import UnknownNode
from taskyard.model.node import NodeStatus
from taskyard.ports.store import Store

MIN_REF_CHARS = 4
"""Characters of an incarnation that must be given: a slip of the pen should not drain a node."""

ACK_TIMEOUT_S, ACK_POLL_S = 2.0, 0.1
"""Seconds a node may take to acknowledge a drain, and between two looks at it."""


class LocalNodes:
    """`NodeCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    async def list(self) -> tuple[NodeDocument, ...]:
        store = self._context.yard.store
        found = sorted(await store.nodes(), key=lambda status: (status.node.name, status.node.incarnation))
        dead = await store.dead_nodes()
        return tuple(node_document(status, dead) for status in found)

    async def drain(self, ref: str, *, draining: bool = True) -> DrainReceipt:
        store = self._context.yard.store
        found = resolve_node(await store.nodes(), ref)
        # As it is now: a worker that runs nothing leaves as soon as it is drained.
        node = node_document(msgspec.structs.replace(found, is_draining=draining), await store.dead_nodes())
        await self._context.yard.drain(node.incarnation, on=draining, by=self._context.actor)
        acknowledged = node.alive and await _wait_acknowledged(store, node.incarnation, draining)
        return DrainReceipt(**msgspec.structs.asdict(node), acknowledged=acknowledged)


async def _wait_acknowledged(store: Store, incarnation: str, draining: bool) -> bool:
    """Whether the node has heard of it, or is gone: a drained worker that runs nothing leaves."""
    until = time.monotonic() + ACK_TIMEOUT_S
    while True:
        nodes = {status.node.incarnation: status.node for status in await store.nodes()}
        if incarnation not in nodes or nodes[incarnation].is_draining is draining:
            return True
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(ACK_POLL_S)


def resolve_node(nodes: Sequence[NodeStatus], ref: str) -> NodeStatus:
    """The one node with this name or incarnation, or whose incarnation begins with it. Raises `UnknownNode` and
    `AmbiguousNode`."""
    exact = [status for status in nodes if ref in (status.node.name, status.node.incarnation)]
    begins = [status for status in nodes if status.node.incarnation.startswith(ref.lower())]
    found = exact or (begins if len(ref) >= MIN_REF_CHARS else [])
    if not found:
        raise UnknownNode(ref)
    if len(found) > 1:
        raise AmbiguousNode(ref, [status.node.label for status in found])
    return found[0]


def node_document(status: NodeStatus, dead: Collection[str]) -> NodeDocument:
    node = status.node
    return NodeDocument(
        name=node.name,
        incarnation=node.incarnation,
        version=node.version,
        host=node.host,
        pid=node.pid,
        queues=node.queues,
        consumers=node.consumers,
        running=status.running,
        draining=status.is_draining,
        stopping=node.is_stopping,
        alive=not status.is_silent and node.incarnation not in dead,
        beat_at=status.beat_at,
        started_at=node.started_at,
        clock_ahead_s=status.ahead_s,
    )
