"""The parts of one node, made for each other, and what they tell each other.

They must not know each other: the dispatcher (which), the due and the recurring loop (when), the runner (how), the
rescuer and the membership (other nodes), the watcher of outcomes (who waits). Whatever one has to tell another goes
through here, on the loop, and waits for nothing. Nothing runs by itself: whoever owns the parts keeps their loops
going.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial

from taskyard.cluster.leader import Leadership
from taskyard.cluster.membership import Hooks as MemberHooks
from taskyard.cluster.membership import Membership
from taskyard.cluster.rescuer import Rescuer
from taskyard.engine.settings import Ground
from taskyard.engine.signals import SignalLoop
from taskyard.execution.runner import Hooks as RunHooks
from taskyard.execution.runner import Runner
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.node import Node
from taskyard.model.notes import NoteCode
from taskyard.ports.places import Places
from taskyard.ports.schedules import ScheduleStore
from taskyard.ports.sink import LeaseLost, LeaseRegained
from taskyard.ports.store import News
from taskyard.queueing.admission import AdmissionControl
from taskyard.queueing.blockers import BlockerLoop
from taskyard.queueing.capacity import Hold, Slots
from taskyard.queueing.checks import Checks
from taskyard.queueing.dispatcher import Dispatcher
from taskyard.queueing.dispatcher import Hooks as DispatchHooks
from taskyard.queueing.outcomes import OutcomeWatcher
from taskyard.queueing.submit_middleware import SubmitChain
from taskyard.queueing.summary import with_results
from taskyard.scheduling.due import DueLoop
from taskyard.scheduling.items import ItemLister
from taskyard.scheduling.recurring import RecurringLoop
from taskyard.version import VERSION


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From any thread. A closed loop raises: a node that has ended follows no changes."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class Parts:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._listeners: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        store = ground.store
        self.slots = self._make_slots()
        self._checks = Checks(ground.settings.checks)
        self.admission = self._make_admission()
        self._watched: dict[Places, Callable[[], None]] = {}
        self._are_places_told = False
        """Whether `_places_changed` is on its way: a thousand places that change at once are looked at once."""
        self._versions: dict[Places, int] = {}
        self.membership = self._make_membership()
        self.dispatcher = self._make_dispatcher()
        self.inbox = self.dispatcher.inbox
        self.runner = self._make_runner()
        self.watcher = OutcomeWatcher(store)
        settings = ground.settings
        self.submits = SubmitChain(settings.middleware, ground.consumers, max_bytes=settings.runner.max_payload_bytes)
        self.due = DueLoop(ground.clock, self.inbox.promote)
        self.recurring = self._make_recurring()
        self.rescuer = Rescuer(store, lambda _: self.changed(), sinks=ground.sinks)
        self.signals = SignalLoop(
            store,
            self._incarnation,
            runner=self.runner,
            slots=self.slots,
            inbox=self.inbox,
            announce=self._drain_changed,
        )
        self._connect()

    # --- each part ----------------------------------------------------------------------------------------------------

    def _make_slots(self) -> Slots:
        ground = self._ground
        return Slots(
            ground.consumers,
            max_running=ground.settings.max_running,
            others=ground.settings.others,
            capacities={name: executor.abilities.capacity for name, executor in ground.executors.items()},
        )

    def _make_membership(self) -> Membership:
        ground = self._ground
        return Membership(
            ground.store,
            clock=ground.clock,
            describe=self._describe,
            is_draining=lambda: self.slots.is_draining,
            settings=ground.settings.lease,
        )

    def _make_dispatcher(self) -> Dispatcher:
        ground = self._ground
        return Dispatcher(
            ground.store,
            self._incarnation(),
            slots=self.slots,
            clock=ground.clock,
            jitter=ground.jitter,
            admission=self.admission,
            sinks=ground.sinks,
            many=ground.settings.many,
            many_ends=ground.settings.many_ends,
        )

    def _make_admission(self) -> AdmissionControl:
        ground = self._ground
        blockers = BlockerLoop(
            ground.store,
            self._checks,
            consumers=ground.consumers,
            node=ground.settings.node_name,
            changed=self._unblocked,
            clock=ground.clock,
            sinks=ground.sinks,
        )
        return AdmissionControl(
            ground.store,
            self.slots,
            blockers,
            consumers=ground.consumers,
            checks=self._checks,
            node=ground.settings.node_name,
            announce=self.announce,
            clock=ground.clock,
        )

    def _unblocked(self) -> None:
        """Tasks that were blocked may start, or wait for their time."""
        self.inbox.look()
        self.announce()

    def _make_runner(self) -> Runner:
        ground = self._ground
        return Runner(
            consumers=ground.consumers,
            executors=ground.executors,
            queues=ground.queues,
            clock=ground.clock,
            hooks=RunHooks(self.inbox.settle, self.inbox.report, partial(with_results, ground.store)),
            jitter=ground.jitter,
            settings=ground.settings.runner,
            fails_unknown=ground.settings.others > 0,
            sinks=ground.sinks,
        )

    def _make_recurring(self) -> RecurringLoop | None:
        ground = self._ground
        if not isinstance(ground.store, ScheduleStore):
            return None
        return RecurringLoop(
            ground.store,
            clock=ground.clock,
            consumers=ground.consumers,
            look_for_leader=Leadership(ground.store, self._incarnation).look,
            fired=self.fired,
            items=ItemLister(
                ground.settings.item_functions, clock=ground.clock, max_bytes=ground.settings.runner.max_payload_bytes
            ),
            fire_inside=self.submits.fire,
            sinks=ground.sinks,
        )

    def _connect(self) -> None:
        self.membership.connect(MemberHooks(self._fenced, self._rejoined, self.signals.drain))
        self.dispatcher.connect(
            DispatchHooks(
                self.runner.start,
                self.runner.is_running,
                self.watcher.settled,
                self.watcher.ended_unrun,
                self._turned,
            )
        )

    def _incarnation(self) -> str:
        return self.membership.incarnation

    def _describe(self, incarnation: str, since: datetime) -> tuple[Node, list[ConsumerSpec]]:
        consumers, settings, slots = self._ground.consumers, self._ground.settings, self.slots
        specs = [consumer.spec(settings.version) for consumer in list(consumers.values())]
        node = Node(
            incarnation=incarnation,
            name=settings.node_name,
            pid=os.getpid(),
            host=socket.gethostname(),
            consumers=tuple(consumers),
            started_at=since,
            version=VERSION,
            queues=tuple(sorted({consumer.queue for consumer in list(consumers.values())})),
            limits=slots.limits(),
            max_running=settings.max_running,
            executors=slots.executors(),
            capacities=slots.capacities(),
            places=slots.places(),
            checks=tuple(sorted(self._checks.kinds)),
            is_stopping=slots.is_stopped,
            is_draining=slots.is_draining,
            specs={spec.name: spec.hash for spec in specs},
        )
        return node, specs

    # --- what has happened, told to whom it concerns ------------------------------------------------------------------

    def notified(self, news: News) -> None:
        """Another process has written."""
        if news is News.ADDED:
            # As most of what is heard is, where others submit what runs here: the store is asked for nothing else.
            self.inbox.look()
            self.announce()
            return
        self.changed()
        if news is News.NODES:
            self.rescuer.poke()

    def changed(self) -> None:
        """Something has happened that is not known here: everything is looked at again."""
        self.inbox.look()  # first: what may start is to start soon
        self.announce()
        self.watcher.changed()
        self.signals.look()
        if self.recurring is not None:
            self.recurring.hint()

    def fired(self) -> None:
        """Schedules have made tasks, and perhaps canceled others."""
        self.inbox.promote()
        self.changed()

    def begin(self) -> None:
        """The node starts on this event loop: from now on it follows what the checks and the places signal."""
        self._loop = asyncio.get_running_loop()
        self._checks.connect(self.admission.blockers.free)
        self._refresh()

    def _refresh(self) -> None:
        """Consumers or their places have changed."""
        self.slots.refresh()
        self.admission.refresh()
        if self._loop is not None:
            self._follow_places(self._loop)

    def _follow_places(self, loop: asyncio.AbstractEventLoop) -> None:
        places = {one.places for one in list(self._ground.consumers.values()) if one.places is not None}
        for gone in self._watched.keys() - places:
            self._watched.pop(gone)()
        for new in places - self._watched.keys():
            self._watched[new] = new.subscribe(partial(self._tell_places, loop))
        self._versions = self._list_versions()

    def _tell_places(self, loop: asyncio.AbstractEventLoop) -> None:
        """From any thread."""
        if not self._are_places_told:
            self._are_places_told = True
            _call_soon(loop, self._places_changed)

    def close(self) -> None:
        """The node has stopped, or could not start: it follows the checks and the places no longer."""
        self._loop = None
        self._checks.disconnect()
        for unsubscribe in self._watched.values():
            unsubscribe()
        self._watched.clear()

    def _places_changed(self) -> None:
        # First: a change that comes from another thread meanwhile is told again.
        self._are_places_told = False
        self.slots.refresh()
        self.admission.refresh()
        versions = self._list_versions()
        if versions != self._versions:
            self._versions = versions
            self.membership.describe_anew()
        self.inbox.look()

    def _list_versions(self) -> dict[Places, int]:
        return {places: places.version for places in self._watched}

    def consumers_changed(self) -> None:
        """A consumer has come or gone."""
        self._refresh()
        self.membership.describe_anew()
        self.inbox.look()
        if self.recurring is not None:
            self.recurring.look()

    def _drain_changed(self) -> None:
        """This node drains, or no longer: its entry in the store says so."""
        self.membership.describe_anew()
        self.announce()

    def _turned(self, next_due: datetime | None) -> None:
        self.due.tell(next_due)
        self.announce()
        if self.recurring is not None:
            self.recurring.turned()
        if self.signals.has_pending_cancel:
            self.signals.look_again()

    def _fenced(self, incarnation: str) -> None:
        """Others may take over what runs here. It is cut short now; how it ended is written all the same, since the
        store takes that only of tasks that nobody else has."""
        self.slots.hold(Hold.FENCE)
        self.runner.interrupt(NoteCode.LEASE_LOST)
        self._ground.sinks.tell(LeaseLost(incarnation))

    def _rejoined(self, old: str, new: str) -> None:
        self.dispatcher.rejoin(new)
        self.slots.release(Hold.FENCE)
        self.rescuer.bury(old, self._is_over, self.dispatcher.forget)
        self.changed()
        self._ground.sinks.tell(LeaseRegained(old, new))

    def _is_over(self, incarnation: str) -> bool:
        return not self.runner.holds_of(incarnation) and not self.dispatcher.owes(incarnation)

    # --- whoever listens ----------------------------------------------------------------------------------------------

    @contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something may have happened in the store, here or elsewhere."""
        event = asyncio.Event()
        self._listeners.add(event)
        try:
            yield event
        finally:
            self._listeners.discard(event)

    def announce(self) -> None:
        for event in self._listeners:
            event.set()
