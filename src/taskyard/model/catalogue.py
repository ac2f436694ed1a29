"""The catalogue: what the nodes of a store publish about their consumers, so that any process can submit to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from taskyard.model.json_schema import fit
from taskyard.model.node import Node, NodeStatus
from taskyard.model.task import DEFAULT_QUEUE

SPEC_KEPT = timedelta(days=7)
"""How long the last specification of a consumer stays that no node has any more: a service may be down for a weekend,
and what is submitted meanwhile is still checked."""


class ConsumerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node publishes about a consumer. `args` and `result` are JSON schemas; None if they are not known. An
    option of a submit may not make `timeout_s` longer. `has_produce`: its tasks are made by its own code, so only a
    process that has this code can submit to it. `account` names the argument whose key the tasks have,
    `bucket_by` the requirement that is their bucket."""

    name: str
    queue: str = DEFAULT_QUEUE
    executor: str = ""
    version: str = ""
    args: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    timeout_s: float | None = None
    has_produce: bool = False
    account: str = ""
    bucket_by: str = ""

    @property
    def hash(self) -> str:
        """The same for equal specifications, whichever node publishes them."""
        text = msgspec.json.encode(self, order="deterministic")
        return blake2b(text, digest_size=16, person=b"taskyard-spec").hexdigest()


class StoredSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A specification in a store. `seen_at` is when a node last joined, changed or left with it."""

    spec: ConsumerSpec
    seen_at: datetime


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One specification of a consumer, and the labels of the nodes that serve it. While a new version is rolled out, a
    consumer has several entries."""

    spec: ConsumerSpec
    seen_at: datetime | None = None
    nodes: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        return bool(self.nodes)


class SpecKey(NamedTuple):
    """Which specification, and when a node last joined, changed or left with it."""

    name: str
    hash: str
    seen_at: datetime


def list_spare(keys: Sequence[SpecKey], nodes: Iterable[Node], *, now: datetime) -> list[SpecKey]:
    """The specifications that are to be forgotten: those that no node has, except the last one of a consumer that no
    node has at all, for `SPEC_KEPT`."""
    used = {pair for node in nodes for pair in node.specs.items()}
    names = {name for name, _ in used}
    last: dict[str, SpecKey] = {}
    for key in sorted(keys, key=lambda key: (key.seen_at, key.hash)):
        last[key.name] = key
    return [
        key
        for key in keys
        if (key.name, key.hash) not in used
        and (key.name in names or last[key.name] != key or key.seen_at < now - SPEC_KEPT)
    ]


def list_entries(
    stored: Sequence[StoredSpec], statuses: Iterable[NodeStatus], *, dead: Collection[str] = ()
) -> list[CatalogueEntry]:
    """All entries by name: those that are served first, then the latest first. A node that is dead, silent, draining or
    stopping serves nothing."""
    serving: dict[tuple[str, str], list[str]] = {}
    known = {(row.spec.name, row.spec.hash): row for row in stored}
    for status in statuses:
        node = status.node
        if status.is_silent or status.is_draining or node.is_stopping or node.incarnation in dead:
            continue
        for name in node.consumers:
            serving.setdefault((name, node.specs.get(name, "")), []).append(node.label)
    entries = [
        CatalogueEntry(spec=row.spec, seen_at=row.seen_at, nodes=tuple(sorted(serving.get(key, ()))))
        for key, row in known.items()
    ]
    # Race: a node may have joined after the specifications were read.
    entries += [
        CatalogueEntry(spec=ConsumerSpec(name=name), nodes=tuple(sorted(nodes)))
        for (name, hash_), nodes in serving.items()
        if (name, hash_) not in known
    ]
    return sorted(entries, key=_order)


def _order(entry: CatalogueEntry) -> tuple[str, bool, float, str]:
    seen = 0.0 if entry.seen_at is None else -entry.seen_at.timestamp()
    return entry.spec.name, not entry.is_served, seen, entry.spec.version


def fit_arguments(spec: ConsumerSpec, args: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The arguments as the specification wants them, what is wrong with them, and the names of those that are wrong."""
    if spec.args is None:
        return args, [], []
    value, misfits = fit(spec.args, args)
    names = [str(misfit.path[0]) for misfit in misfits if misfit.path]
    return value, [str(misfit) for misfit in misfits], names
