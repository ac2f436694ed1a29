"""Specifications of consumers: published by nodes, stored once, forgotten when nobody needs them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from taskyard.model.catalogue import SPEC_KEPT, ConsumerSpec
from taskyard.model.node import Node
from taskyard.ports.store import Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node
from taskyard.testing.store_contract.desk import Desk, tick

FETCH = ConsumerSpec(
    name="fetch",
    queue="net",
    executor="inline",
    version="1.0",
    args={"type": "object", "properties": {"url": {"type": "string", "default": "é\u2028'\\"}}, "required": ["url"]},
    result={"type": "integer"},
    timeout_s=2.5,
)
NEWER = msgspec.structs.replace(FETCH, version="1.1")
SHRINK = ConsumerSpec(name="shrink", has_produce=True)


def having(name: str, *specs: ConsumerSpec) -> Node:
    """A node with these consumers."""
    hashes = {spec.name: spec.hash for spec in specs}
    return msgspec.structs.replace(a_node(name), consumers=tuple(hashes), specs=hashes)


async def join(store: Store, name: str, *specs: ConsumerSpec) -> str:
    node = having(name, *specs)
    await store.join(node, specs)
    return node.incarnation


async def specs_of(store: Store) -> Sequence[ConsumerSpec]:
    return [stored.spec for stored in await store.list_specs()]


class CatalogueContract(Desk):
    async def test_what_nodes_publish_is_listed_once(self, store: Store, clock: ManualClock) -> None:
        """Equal specifications of several nodes are one, with all their fields, by name, the latest first; `seen_at` is
        when a node last joined with it."""
        assert await specs_of(store) == []
        await join(store, "c", FETCH, SHRINK)
        later = tick(clock, 1)
        await join(store, "d", FETCH)
        await join(store, "e", NEWER)
        assert await specs_of(store) in ([FETCH, NEWER, SHRINK], [NEWER, FETCH, SHRINK])  # both at the same time
        assert [stored.seen_at for stored in await store.list_specs()][:2] == [later, later]
        latest = tick(clock, 1)
        await join(store, "f", NEWER)
        assert await specs_of(store) == [NEWER, FETCH, SHRINK]
        assert (await store.list_specs())[0].seen_at == latest

    async def test_a_node_says_which_it_has(self, store: Store) -> None:
        """A node names its specifications by hash, as it joined and as it described itself since."""
        incarnation = await join(store, "c", FETCH)
        nodes = {status.node.incarnation: status.node.specs for status in await store.nodes()}
        assert nodes[incarnation] == {"fetch": FETCH.hash}
        await store.describe(having("c", NEWER), [NEWER])
        nodes = {status.node.incarnation: status.node.specs for status in await store.nodes()}
        assert nodes[incarnation] == {"fetch": NEWER.hash}

    async def test_what_a_node_has_stays(self, store: Store, clock: ManualClock) -> None:
        """A specification that a node has stays, however long it runs and whatever others publish."""
        await join(store, "c", FETCH)
        tick(clock, 3 * SPEC_KEPT.total_seconds())
        await store.leave(await join(store, "d", NEWER))
        assert FETCH in await specs_of(store)

    async def test_the_last_one_stays_for_a_week(self, store: Store, clock: ManualClock) -> None:
        """When no node has a consumer, only its last specification stays, for `SPEC_KEPT` after the node left."""
        old, new = await join(store, "c", FETCH), await join(store, "d", NEWER)
        tick(clock, 1)
        await store.leave(old)
        assert await specs_of(store) == [NEWER]
        tick(clock, 2 * SPEC_KEPT.total_seconds())
        await store.leave(new)
        assert await specs_of(store) == [NEWER]
        tick(clock, SPEC_KEPT.total_seconds())
        await join(store, "e", SHRINK)
        assert await specs_of(store) == [NEWER, SHRINK]
        tick(clock, 1)
        await join(store, "f", SHRINK)
        assert await specs_of(store) == [SHRINK]

    async def test_a_dead_node_needs_its_specifications_no_more(self, store: Store, clock: ManualClock) -> None:
        """A rescue forgets the node, and then its specifications count as those of one that left."""
        dead = await join(store, "c", FETCH)
        tick(clock, 2 * SPEC_KEPT.total_seconds())
        await store.rescue(dead)
        assert await specs_of(store) == [FETCH]
        await join(store, "d", NEWER)
        assert await specs_of(store) == [NEWER]

    async def test_a_consumer_that_changes_replaces_its_specification(self, store: Store, clock: ManualClock) -> None:
        """A node that describes itself anew publishes what is new. What it had before is forgotten, except the last
        specification of a consumer that no node has any more."""
        await join(store, "c", FETCH)
        tick(clock, 1)
        await store.describe(having("c", NEWER, SHRINK), [NEWER, SHRINK])
        assert await specs_of(store) == [NEWER, SHRINK]
        tick(clock, 1)
        await store.describe(having("c", NEWER), [NEWER])
        assert await specs_of(store) == [NEWER, SHRINK]

    async def test_a_node_that_is_gone_publishes_nothing(self, store: Store) -> None:
        """A node that is not, or no longer, among the nodes cannot describe itself, and stores no specification."""
        await store.describe(having("gone", FETCH), [FETCH])
        assert await specs_of(store) == []
