"""The specifications of consumers in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

import msgspec

from taskyard.model.catalogue import ConsumerSpec, SpecKey, StoredSpec, list_spare
from taskyard.model.node import Node


class Catalogue:
    def __init__(self) -> None:
        self._stored: dict[tuple[str, str], StoredSpec] = {}

    def publish(self, specs: Sequence[ConsumerSpec], nodes: Collection[Node], now: datetime) -> None:
        """Store these, and forget what these nodes no longer need."""
        for spec in specs:
            self._stored[spec.name, spec.hash] = StoredSpec(spec=spec, seen_at=now)
        keys = [SpecKey(name, hash_, row.seen_at) for (name, hash_), row in self._stored.items()]
        for key in list_spare(keys, nodes, now=now):
            del self._stored[key.name, key.hash]

    def see(self, node: Node, now: datetime) -> None:
        """The node leaves or changes, and has had its specifications until now."""
        for key in node.specs.items():
            if key in self._stored:
                self._stored[key] = msgspec.structs.replace(self._stored[key], seen_at=now)

    def list_all(self) -> list[StoredSpec]:
        rows = sorted(self._stored.items(), key=lambda item: item[0][1])
        rows.sort(key=lambda item: item[1].seen_at, reverse=True)
        return [row for (name, _), row in sorted(rows, key=lambda item: item[0][0])]
