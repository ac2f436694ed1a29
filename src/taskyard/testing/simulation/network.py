"""The way from simulated nodes to one store: slow, lossy, and now and then away.

The store is the core of the `MemoryStore`, shared by all. What happens to a call is drawn by lot: it is refused before
it had any effect, its answer is lost after the effect or without any (`OutcomeUnknown`), either way takes long, the
caller dies meanwhile. What was sent is carried out, also when its sender is dead by then; but never after a call that
the same node sent when it had given up on this one.

Who lives is told by beats, as on a store of many machines: a node that the store has not heard for `LEASE_S` may be
given up by any other, and is told so at its next beat.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from taskyard.errors import OutcomeUnknown, StoreUnavailable, TaskyardError
from taskyard.ports.store import News
from taskyard.stores.memory import MemoryCore
from taskyard.testing.simulation.history import History
from taskyard.testing.simulation.loop import PROCESS, Process

T = TypeVar("T")

LEASE_S = 2.0

POLL_S = 5.0
"""A hint that got lost is made up for by the next look, which every store that sends hints takes now and then."""

HALF_OPEN_S = 3.0
"""How long a call to a store that is away may hang before its caller gives up."""


class Weather(NamedTuple):
    """How likely what is, per call: it is refused; its answer is lost, with and without the effect; it fails by a bug;
    its sender is struck meanwhile; it, or its answer, takes up to `slow_s`. And of hints: it is lost."""

    refused: float = 0.0
    unknown: float = 0.0
    odd: float = 0.0
    deadly: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0
    hint_lost: float = 0.0


FAIR = Weather()


class Network:
    """All that is shared: the core of the store, who lives, and the weather."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, core: MemoryCore, history: History, rng: random.Random, weather: Weather
    ) -> None:
        self.loop, self.core, self.history, self.rng = loop, core, history, rng
        self.weather = weather
        self.is_away = False
        self.beats: dict[str, float] = {}
        self.processes: dict[str, Process | None] = {}
        self.strike: Callable[[Process], None] = Process.kill
        self._lines: list[Line] = []
        self._told = 0
        self._here = contextvars.Context()  # of no process

    def add(self, line: Line) -> None:
        self._lines.append(line)

    @property
    def is_quiet(self) -> bool:
        """Whether no call is on its way here."""
        return not any(line.has_calls for line in self._lines)

    def at(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """On the store's side: the death of whoever asked does not matter any more."""
        if delay_s > 0:
            self.loop.call_later(delay_s, call, *args, context=self._here.copy())
        else:
            self.loop.call_soon(call, *args, context=self._here.copy())

    def travel_s(self) -> float:
        lot = self.rng.random()
        if lot < self.weather.slow:
            return self.rng.random() * self.weather.slow_s
        return 0.0 if lot > 0.7 else lot * 0.002

    def carry_out(self, line: Line, verb: str, effect: Callable[[], T]) -> T:
        """Now; the others are told if it has left an event."""
        answer = effect()
        self.history.say(f"{self.loop.time():.6f} {line.name}: {verb} -> {line.tell(answer)}")
        if self.core.event_seq != self._told:
            self._told = self.core.event_seq
            for other in self._lines:
                if other is not line:
                    other.hint(self._hint_s())
        return answer

    def tell_all(self) -> None:
        """Something was written that leaves no event."""
        for line in self._lines:
            line.hint(self._hint_s())

    def _hint_s(self) -> float:
        lot = self.rng.random()
        if lot < self.weather.hint_lost:
            return POLL_S * self.rng.random()
        return 0.0 if lot > 0.7 else lot * 0.01

    def is_over(self, incarnation: str) -> bool:
        """Whether the lease of this node has run out."""
        heard = self.beats.get(incarnation)
        return heard is not None and self.loop.time() - heard > LEASE_S


class Line:
    """One node's connection: calls there, answers and hints back."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.is_cut_off = False
        self._under_way: list[_Call[object]] = []
        self._heard: Callable[[News], None] | None = None
        self._context: contextvars.Context | None = None
        self._hint_due: float | None = None
        network.add(self)

    @property
    def is_down(self) -> bool:
        return self.is_cut_off or self.network.is_away

    @property
    def has_calls(self) -> bool:
        return not all(call.has_arrived for call in self._under_way)

    def tell(self, answer: object) -> str:
        """What of an answer is worth a line in the history."""
        return str(answer)

    async def ask(self, verb: str, effect: Callable[[], T], *, is_odd: bool = False) -> T:
        """Carry out `effect` at the store. `is_odd`: it may also fail in a way that no store should."""
        network, rng = self.network, self.network.rng
        call = _Call(self, verb, effect)
        process = PROCESS.get()
        if process is not None and rng.random() < network.weather.deadly:
            network.at(rng.random() * 0.01, network.strike, process)
        lot, weather = rng.random(), network.weather
        if self.is_down:
            error = StoreUnavailable("the store is away") if lot < 0.5 else OutcomeUnknown("the store went away")
            network.at(lot * lot * HALF_OPEN_S, call.fail, error)
        elif lot < weather.refused:
            network.at(network.travel_s(), call.fail, StoreUnavailable("the store cannot be reached"))
        elif lot < weather.refused + weather.unknown:
            self._lose(call)
        elif is_odd and rng.random() < weather.odd:
            network.at(network.travel_s(), call.fail, ZeroDivisionError("a bug in the store"))
        else:
            self._under_way.append(call)  # type: ignore[arg-type]
            network.at(network.travel_s(), call.arrive)
        return await call.reply

    def _lose(self, call: _Call[T]) -> None:
        """The answer never comes. The effect does, or not; before the caller has given up, or after."""
        rng = self.network.rng
        if rng.random() < 0.7:
            self._under_way.append(call)  # type: ignore[arg-type]
            self.network.at(self.network.travel_s() + rng.choice((0.0, 0.0, rng.random())), call.arrive)
            call.is_lost = True
        self.network.at(self.network.travel_s() + rng.random() * 0.01, call.fail, OutcomeUnknown("connection lost"))

    def given_up(self) -> list[_Call[object]]:
        """What is under way although nobody waits for its answer any more."""
        self._under_way = [call for call in self._under_way if not call.has_arrived]
        return [call for call in self._under_way if call.reply.done()]

    # --- hints --------------------------------------------------------------------------------------------------------

    def watch(self, heard: Callable[[News], None]) -> None:
        self._heard, self._context = heard, contextvars.copy_context()

    def hint(self, delay_s: float) -> None:
        """Tell this node, some time, that something was written. One hint on its way is as good as two."""
        due = self.network.loop.time() + delay_s
        if self._heard is not None and (self._hint_due is None or due < self._hint_due):
            self._hint_due = due
            self.network.at(delay_s, self._hinted, due)

    def _hinted(self, due: float) -> None:
        if self._hint_due == due and self._heard is not None:
            self._hint_due = None
            self.network.loop.call_soon(self._heard, News.CHANGED, context=self._context)


class _Call(Generic[T]):
    def __init__(self, line: Line, verb: str, effect: Callable[[], T]) -> None:
        self.line, self.verb, self._effect = line, verb, effect
        self.reply: asyncio.Future[T] = line.network.loop.create_future()
        self.is_lost = self.has_arrived = False
        self._first = line.given_up()

    def arrive(self) -> None:
        if self.has_arrived:
            return
        self.has_arrived = True
        for call in self._first:
            call.arrive()
        network = self.line.network
        try:
            answer = network.carry_out(self.line, self.verb, self._effect)
        except TaskyardError as error:
            network.at(network.travel_s(), self.fail, error)
            return
        if not self.is_lost:
            network.at(network.travel_s(), self._give, answer)

    def _give(self, answer: T) -> None:
        if not self.reply.done():
            self.reply.set_result(answer)

    def fail(self, error: Exception) -> None:
        network = self.line.network
        network.history.say(f"{network.loop.time():.6f} {self.line.name}: {self.verb} -> {type(error).__name__}")
        if not self.reply.done():
            self.reply.set_exception(error)
