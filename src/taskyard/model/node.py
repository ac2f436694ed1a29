"""A node: one process on a store, and what the store knows of it."""

from __future__ import annotations

from datetime import datetime

import msgspec

SKEW_S = 3.0
"""How far the clock of a node may be off before anybody is told: tasks are due by the clock of the node that looks."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One process on the store. `incarnation` is random: a reused name is another node. `queues` are those its
    consumers belong to; a task of theirs that was put on another queue is served as well. `limits` says how many tasks
    of a source it runs at once, `max_running` how many of all, `capacities` how many each of its executors does, where
    that has a limit, and `executors` which of them a source uses: for people to see, it keeps to them by itself.
    `places` are the labels of each place of a consumer that has places; `checks` the requirements that it judges by an
    admission check. `specs` has the hash of the specification that it publishes for each consumer. One that
    `is_stopping` takes nothing new, and leaves when what it runs has ended; one that `is_draining` has heard that it is
    drained."""

    incarnation: str
    name: str
    pid: int
    host: str
    consumers: tuple[str, ...] = ()
    started_at: datetime | None = None
    version: str = ""
    queues: tuple[str, ...] = ()
    limits: dict[str, int] = {}
    max_running: int | None = None
    executors: dict[str, str] = {}
    capacities: dict[str, int] = {}
    places: dict[str, list[dict[str, str]]] = {}
    checks: tuple[str, ...] = ()
    is_stopping: bool = False
    is_draining: bool = False
    specs: dict[str, str] = {}

    @property
    def label(self) -> str:
        """`host-4242 (5a0bd64d)`: enough to know it by, in a text."""
        return f"{self.name} ({self.incarnation[:8]})"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the store knows it: how many tasks it holds, and whether somebody drains it. Where nodes have to say
    that they live (`LeasedStore`), `beat_at` is when it last did, and `is_silent` that this is longer ago than the
    lease, by the store's clock. That is for people to see: whether it is dead, those decide who have watched it. Where
    the store has a clock of its own, `ahead_s` is how far that of the node was ahead of it when the node joined."""

    node: Node
    running: int
    beat_at: datetime | None = None
    is_silent: bool = False
    is_draining: bool = False
    ahead_s: float | None = None

    @property
    def is_clock_off(self) -> bool:
        return self.ahead_s is not None and abs(self.ahead_s) > SKEW_S
