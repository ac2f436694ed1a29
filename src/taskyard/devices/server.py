"""`PoolServer`: serves the devices of one pool on this node, an actor each.

It is the only part between the store and the actors. From the store it reads which devices there are and what people
have ordered; it asks to serve those that this node may serve, and makes, changes and closes actors. To the store it
writes what actors say of their health, the quarantine that an actor asks for, and the accounts whose runs all failed.
Whatever it could not write it writes with the next look, so a store that is away loses nothing.

A device whose presence this node has lost has no actor here: it belongs to another node.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

from taskyard.devices.actor import WorkerActor
from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.definitions import DeviceDefinition
from taskyard.devices.executor import DeviceExecutor
from taskyard.devices.kinds import check_served, make_definition
from taskyard.devices.quarantine import AccountWatch
from taskyard.devices.reach import Reach
from taskyard.devices.roster import Roster
from taskyard.errors import StoreError, TaskyardError, UnknownDevice
from taskyard.model.device import (
    CODE_GOES_ON,
    DeviceHealth,
    DeviceSpec,
    DeviceStatus,
    HandOverDevice,
    QuarantineDevice,
)
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.ports.clock import Clock
from taskyard.ports.device import DeviceReport, DeviceStore
from taskyard.ports.places import Place, Places
from taskyard.ports.sink import LeaseLost, LeaseRegained, NodeEvent, TasksClaimed, TasksSettled
from taskyard.ports.store import Store

log = logging.getLogger("taskyard.devices")

LOOK_S = 1.0
"""Seconds between two looks at the stamp of the store."""

RETRY_S = 5.0
"""Seconds until a device is asked for again that is free, or made again that could not be made."""

LENGTH_S = 0.1
"""Seconds from a change of the length of the queue to the log line: a busy farm has hundreds a second."""

CLOSE_S = 10.0
"""Seconds: how long the actors have at a stop to interrupt what still runs, and to let go of their devices."""

LET_GO_S = 3.0
"""Seconds: how long a node that has stopped and stays joined tries to tell the store of its devices."""


class PoolServer:
    """`places` are those of the pool: a device is ready there while its actor takes tasks. It is also a sink of the
    node."""

    kinds: Collection[type[NodeEvent]] = (TasksClaimed, TasksSettled, LeaseLost, LeaseRegained)

    def __init__(
        self,
        pool: str,
        *,
        definitions: Mapping[str, DeviceDefinition],
        adapters: Iterable[type[DeviceDefinition]],
        places: Places,
        roster: Roster,
        accounts: AccountWatch,
        clock: Clock,
        settings: ActorSettings,
    ) -> None:
        self._pool, self._definitions, self._adapters = pool, definitions, tuple(adapters)
        self._places, self._roster, self._accounts = places, roster, accounts
        self._clock, self._settings = clock, settings
        self._jitter: Callable[[], float] = random.random
        self.host = socket.gethostname()
        self.actors: dict[str, WorkerActor] = {}
        """The actors by the names of their devices, until they have let go of them."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unusable: dict[str, str] = {}
        """Why a device has no actor, by its name: its definition makes no sense here."""
        self._to_report: dict[str, None] = {}
        self._given_up: dict[str, None] = {}
        """Devices whose actors ask for a quarantine."""
        self._reach = Reach(pool)
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._store: Store | None = None
        self._find_node: Callable[[], str] = lambda: ""
        self._node = self._by = ""
        self._is_fenced = self._is_away = False
        self._seen = -1
        self._is_missing_some = self._is_work_left = False
        """Whether some devices are to be asked for again; whether one of ours has no actor any more."""
        self._retry_mono = 0.0
        self._length: tuple[int, int] | None = None
        self._is_length_noted = False

    # --- starting and stopping ----------------------------------------------------------------------------------------

    def make_executor(self) -> DeviceExecutor:
        """The executor of the pool. It ends this server when the node has stopped."""
        return _PoolExecutor(self)

    async def define(self, store: DeviceStore) -> None:
        """Put the devices of the program into the store; `DeviceExists` if one of them collides with another."""
        if self._definitions:
            await store.define_devices([one.spec(self._pool) for one in self._definitions.values()], by="")

    def begin(self, store: Store, find_node: Callable[[], str], by: str) -> None:
        """The node has joined: serve its devices from now on. `find_node` is under which incarnation it is known."""
        self._store, self._find_node, self._by = store, find_node, by
        self._node, self._is_fenced, self._is_away = "", False, False
        self._length, self._is_length_noted = None, False
        self._wake, self._seen = asyncio.Event(), -1
        self._loop = asyncio.get_running_loop().create_task(self._run(), name=f"taskyard-devices-{self._pool}")

    async def pause(self) -> None:
        """The node stops: serve no more devices. What runs on them goes on."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.cancel()
            await asyncio.wait([loop])

    async def close(self, *, wait: bool = True) -> None:
        """End all actors: what still runs on them is interrupted. Without `wait` that was in vain: such code is left
        behind, and the node stays joined for its claims. It lets go of the other devices then."""
        await self.pause()
        actors = dict(self.actors)
        for name, actor in actors.items():
            self._close_actor(name, "the node stops", grace_s=0.0)
            if not wait and actor.has_code:
                self._running[name].cancel()
        await _wait_for(self._closing.values(), CLOSE_S)
        for task in self._running.values():
            task.cancel()
        await _wait_for(self._running.values(), CLOSE_S)
        adapters = [actor.closing_adapter for actor in actors.values()]
        await _wait_for([closing for closing in adapters if closing is not None], CLOSE_S)
        if not wait:
            await self._let_go({name for name, actor in actors.items() if actor.has_code})
        self.actors.clear()
        self._closing.clear()
        self._running.clear()
        self._to_report.clear()
        self._given_up.clear()
        self._unusable.clear()
        self._reach.clear()

    async def _let_go(self, left: set[str]) -> None:
        """Keep only the devices that code left behind may still use: they are down."""
        if not self._node:
            return
        health = DeviceHealth(reason=CODE_GOES_ON, since=self._clock.now())
        store, node = self._devices_store, self._node
        try:
            async with asyncio.timeout(LET_GO_S):
                await store.report_devices(node, [DeviceReport(name, health) for name in sorted(left)])
                mine = [one.name for one in await store.list_devices(self._pool) if one.node == node]
                await store.unserve_devices(node, [name for name in mine if name not in left])
        except (StoreError, TimeoutError) as error:
            text = "pool %s: its devices stay with this node until the process ends: %s"
            log.warning(text, self._pool, error or "the store does not answer")

    def look(self) -> None:
        """Somebody in this process has changed something: do not wait for the next second."""
        self._wake.set()

    def note_length(self) -> None:
        """The length of the queue may have changed. It is read and logged a little later, with other changes."""
        if self._loop is not None and not self._is_length_noted and log.isEnabledFor(logging.INFO):
            self._is_length_noted = True
            asyncio.get_running_loop().call_later(LENGTH_S, self._wake.set)

    def tell(self, event: NodeEvent) -> None:
        """As a sink of the node."""
        match event:
            case TasksClaimed(claims=claims):
                for claim in claims:
                    record = claim.record
                    if record.queue == self._pool:
                        text, extra = "task %s from %s for account %s goes to the device %s", {"device": record.device}
                        log.info(text, record.uuid, record.consumer, record.key, record.device, extra=extra)
                        self.note_length()
            case TasksSettled(settles=settles, answers=answers):
                for (claim, move), refused in zip(settles, answers, strict=True):
                    if claim.record.queue == self._pool and refused is None:
                        self._settled(claim.record.key, claim.record.consumer, move)
            case LeaseLost():
                # Others may serve the devices now. What ran on them is interrupted by the node.
                self._is_fenced = True
                self._lose_all("this node has lost its lease")
            case LeaseRegained():
                self._is_fenced = False
                self._wake.set()

    def _settled(self, account: str | None, consumer: str, move: Move) -> None:
        self.note_length()
        if account is None:
            return
        if (move.run or move.state) is TaskState.FAILED:
            if self._accounts.note_failure(account, consumer):
                self._wake.set()
        elif move.state is TaskState.COMPLETED:
            self._accounts.note_success(account, consumer)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wake = self._wake
            try:
                await self._look()
                if self._is_away:
                    self._is_away = False
                    log.info("pool %s: the store answers again", self._pool)
            except StoreError as error:
                if not self._is_away:
                    self._is_away = True
                    log.warning("pool %s: the store does not answer, what has changed is kept: %s", self._pool, error)
                wake = asyncio.Event()  # not before the pause is over, whatever happens to the devices
            except Exception:
                log.exception("pool %s: its devices could not be looked after; the next look follows", self._pool)
                wake = asyncio.Event()
            await self._clock.wait(wake, self._clock.monotonic() + LOOK_S)

    async def _look(self) -> None:
        if self._is_fenced:
            return
        node = self._find_node()
        if node != self._node:
            if self._node:
                self._lose_all("this node has joined the store anew")
            self._node, self._seen = node, -1
        is_retry = self._is_missing_some and self._clock.monotonic() >= self._retry_mono
        await self._roster.look(anew=is_retry)
        if self._roster.version != self._seen or self._is_work_left:
            await self._serve_anew(node)
        await self._report(node)
        await self._leave_unreachable(node)
        await self._write_quarantines()
        await self._hand_over()
        await self._accounts.look(self._devices_store, self._roster, node=node, by=self._by)
        await self._log_length()

    @property
    def _devices_store(self) -> DeviceStore:
        assert isinstance(self._store, DeviceStore)
        return self._store

    # --- which devices ------------------------------------------------------------------------------------------------

    async def _serve_anew(self, node: str) -> None:
        version, self._is_work_left = self._roster.version, False
        try:
            await self._serve(node)
        except BaseException:
            self._is_work_left = True  # the stamp of the store does not say so
            raise
        self._seen, self._retry_mono = version, self._clock.monotonic() + RETRY_S

    async def _serve(self, node: str) -> None:
        """Make what is served here what it should be."""
        known = {one.name: one for one in self._roster.devices}
        mine, now = {name for name, one in known.items() if one.node == node}, self._clock.monotonic()
        self._reach.leaving &= mine
        wanted = {name: one for name, one in known.items() if self._is_wanted(one.spec)}
        for name in self.actors.keys() - mine:
            # Also if nobody serves it now: somebody may have, since we did.
            self._lose(name, "the device was removed" if name not in known else "this node does not serve it any more")
        # One that another node serves is not asked for: the stamp tells when it is free.
        free = [name for name, one in wanted.items() if name not in mine and not one.node]
        asked = [
            name
            for name, one in wanted.items()
            if name not in mine and name not in self.actors and self._reach.may_ask(name, one.node, now)
        ]
        if asked:
            mine.update(await self._devices_store.serve_devices(node, asked))
        self._is_missing_some = not mine.issuperset(free)
        for name in [name for name in self.actors if name in mine and name not in wanted]:
            self._close_actor(name, "another host is to serve the device")
        for name in [name for name in self._unusable if name not in mine]:
            del self._unusable[name]
        let_go = [name for name in known if name in mine and name not in wanted and name not in self.actors]
        if let_go:
            await self._devices_store.unserve_devices(node, let_go)
        for name, status in wanted.items():
            if name in mine:
                self._fit(status)
        self._is_missing_some |= bool(self._unusable)

    def _is_wanted(self, spec: DeviceSpec) -> bool:
        """Whether this node may serve it. What a program defines is served by the nodes that have that program."""
        if spec.name in self._reach.leaving:
            return False
        return (not spec.host or spec.host == self.host) and (not spec.from_code or spec.name in self._definitions)

    def _fit(self, status: DeviceStatus) -> None:
        """Make the actor of a device of ours fit what the store says."""
        name, spec = status.name, status.spec
        actor = self.actors.get(name)
        if actor is None:
            self._make_actor(status)
            return
        if name in self._closing:
            return
        if _needs_another_actor(actor.spec, spec):
            self._close_actor(name, "its definition was changed")
            return
        actor.set_orders(status.orders)
        if actor.spec != spec:
            actor.replace_spec(spec)
            self._places.add(Place(name, spec.labels), is_ready=actor.takes_tasks)

    def _make_actor(self, status: DeviceStatus) -> None:
        name, spec = status.name, status.spec
        try:
            definition = self._find_definition(spec)
            adapter = definition.make_adapter()
            restart_app_s, restart_s = definition.restart_app_s, definition.restart_s
            settings = self._settings.with_repairs(restart_app_s=restart_app_s, restart_s=restart_s)
        except Exception as exc:  # an adapter of somebody else: it must not keep other devices from being served
            reason = str(exc) if isinstance(exc, TaskyardError) else f"{type(exc).__name__}: {exc}"
            if self._unusable.get(name) != reason:
                log.warning("device %s cannot be served: %s", name, reason, extra={"device": name})
                self._unusable[name] = reason
                self._to_report[name] = None
            return
        self._unusable.pop(name, None)
        actor = WorkerActor(
            spec,
            adapter,
            clock=self._clock,
            jitter=self._jitter,
            settings=settings,
            changed=self._actor_changed,
            orders=status.orders,
        )
        self.actors[name] = actor
        self._reach.begin(name, self._clock.monotonic())
        self._places.add(Place(name, spec.labels), is_ready=actor.takes_tasks)
        self._running[name] = self._spawn(actor.run_forever(), f"taskyard-device-{name}")

    def _find_definition(self, spec: DeviceSpec) -> DeviceDefinition:
        """What the program says, unless a person has changed how the device is reached."""
        own = self._definitions.get(spec.name)
        if own is not None and not _needs_another_actor(own.spec(self._pool), spec):
            return own
        check_served(spec.adapter, self._adapters)
        return make_definition(spec, self._adapters)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        task.add_done_callback(_tell_fault)
        return task

    def _actor_changed(self, actor: WorkerActor) -> None:
        name = actor.name
        if self.actors.get(name) is not actor:
            return
        if name not in self._closing:
            self._places.set_ready(name, actor.takes_tasks)
        self._to_report[name] = None
        if actor.gave_up:
            self._given_up[name] = None
        if actor.health.is_up:
            self._reach.note_up(name)
        self._wake.set()

    async def _leave_unreachable(self, node: str) -> None:
        """Let go of devices that this node cannot reach, if others may."""
        if self._store is None:
            return
        for name in await self._reach.leave(self._store, node, self.actors, self._clock.monotonic()):
            self._is_work_left = True
            if name not in self._closing:
                self._close_actor(name, "it is not reached from here, and other nodes may reach it")
            self._wake.set()

    # --- which no more ------------------------------------------------------------------------------------------------

    def _lose_all(self, reason: str) -> None:
        self._unusable.clear()
        for name in list(self.actors):
            self._lose(name, reason)

    def _lose(self, name: str, reason: str) -> None:
        """The device is not ours any more: nothing of ours may go on there."""
        self.actors[name].revoke(reason)
        self._close_actor(name, reason, grace_s=0.0)

    def _close_actor(self, name: str, reason: str, *, grace_s: float | None = None) -> None:
        """Take no more tasks there, and end the actor when its run has ended, or after this time."""
        actor = self.actors[name]
        if name in self._closing:
            if grace_s is None:
                return
        else:
            log.info("device %s is let go: %s", name, reason, extra={"device": name})
            self._reach.end(name)
            self._places.remove(name)
            self._to_report.pop(name, None)
        self._closing[name] = self._spawn(self._end_actor(actor, grace_s), f"taskyard-device-{name}-end")

    async def _end_actor(self, actor: WorkerActor, grace_s: float | None) -> None:
        await actor.close(grace_s=grace_s)
        name = actor.name
        if self.actors.get(name) is actor:
            del self.actors[name]
            self._closing.pop(name, None)
            self._running.pop(name, None)
            self._is_work_left = True  # perhaps another actor takes its place
            self._wake.set()

    # --- what is written ----------------------------------------------------------------------------------------------

    async def _report(self, node: str) -> None:
        """Write what has changed in the health of the devices, all in one go."""
        names, self._to_report = self._to_report, {}
        reports = [DeviceReport(name, health) for name in names if (health := self._health(name)) is not None]
        if not reports:
            return
        try:
            lost = await self._devices_store.report_devices(node, reports)
        except BaseException:
            self._to_report |= names
            raise
        for name in lost:
            self._unusable.pop(name, None)
            if name in self.actors:
                self._lose(name, "this node does not serve it any more")
        if lost:
            self._is_missing_some, self._retry_mono = True, 0.0

    def _health(self, name: str) -> DeviceHealth | None:
        actor = self.actors.get(name)
        if actor is not None:
            return actor.health if name not in self._closing or actor.is_left_behind else None
        reason = self._unusable.get(name)
        return None if reason is None else DeviceHealth(reason=reason, since=self._clock.now())

    async def _write_quarantines(self) -> None:
        """Of the devices that nothing made answer again."""
        for name in list(self._given_up):
            actor = self.actors.get(name)
            if actor is not None and actor.gave_up and name not in self._closing:
                command = QuarantineDevice(reason=actor.gave_up)
                try:
                    status = await self._devices_store.command_device(name, command, by=self._by)
                    actor.set_orders(status.orders)
                except UnknownDevice:
                    pass  # it was removed meanwhile: the next look finds that out
            self._given_up.pop(name, None)

    async def _hand_over(self) -> None:
        """Begin the time of those who have taken a device for a while, when its run has ended."""
        for name, actor in list(self.actors.items()):
            taken = actor.to_hand_over
            if taken is None or name in self._closing:
                continue
            try:
                command = HandOverDevice(reason=taken.reason)
                status = await self._devices_store.command_device(name, command, by=taken.actor)
            except UnknownDevice:
                continue  # it was removed meanwhile: the next look finds that out
            actor.set_orders(status.orders)

    async def _log_length(self) -> None:
        if not self._is_length_noted or self._store is None:
            return
        counts = {state: n for (queue, state), n in (await self._store.count()).items() if queue == self._pool}
        running = counts.get(TaskState.RUNNING, 0)
        length = sum(n for state, n in counts.items() if state in WAITS), running
        self._is_length_noted = False
        if length != self._length:
            self._length = length
            log.info("pool %s: %d tasks wait, %d run", self._pool, *length, extra={"queue": self._pool})


WAITS = (TaskState.QUEUED, TaskState.BLOCKED, TaskState.PAUSED, TaskState.SCHEDULED, TaskState.RETRYING)


class _PoolExecutor(DeviceExecutor):
    """Ends the actors when the node has stopped, before it leaves the store and others may serve the devices."""

    def __init__(self, server: PoolServer) -> None:
        super().__init__(server.actors, clock=server._clock)
        self._server = server

    async def shutdown(self, *, wait: bool = True) -> None:
        await super().shutdown(wait=wait)
        await self._server.close(wait=wait)


def _needs_another_actor(before: DeviceSpec, after: DeviceSpec) -> bool:
    """Whether the device is reached in another way."""
    return (before.adapter, before.address, before.settings, before.number) != (
        after.adapter,
        after.address,
        after.settings,
        after.number,
    )


async def _wait_for(tasks: Collection[asyncio.Task[None]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait([*tasks], timeout=timeout_s)


def _tell_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
