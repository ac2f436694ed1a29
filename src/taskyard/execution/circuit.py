"""A circuit per algorithm: after several crashes in a row nothing is sent any more, until a trial shows that it works.

Pure but for what it remembers: time is what the caller says it is. A crash is a `system` error. What a run raised by
itself shows a living worker and ends the row; a timeout, a cancel or a rejection says nothing either way.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from taskyard.model.execution import ErrorKind, ExecutionResult


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class CircuitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Open after `crashes` in a row; try one request after `cool_down_s`, and again as long after a trial that crashed.
    `crashes=None` never opens."""

    crashes: int | None = 3
    cool_down_s: float = 30.0

    def __post_init__(self) -> None:
        if (self.crashes is not None and self.crashes < 1) or not self.cool_down_s > 0:
            raise ValueError("crashes must be at least 1, or None, and cool_down_s positive")


class Pass(msgspec.Struct, frozen=True):
    """Leave to run; to be handed back with the result. `era` counts the openings before it: what began before the
    circuit opened says nothing about it afterwards."""

    era: int
    is_trial: bool = False


class Circuit:
    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._crashes = self._era = 0
        self._opened_mono = 0.0
        self.state = CircuitState.CLOSED

    def admit(self, now_mono: float) -> Pass | float:
        """Leave to run, or the seconds after which to ask again."""
        if self.state is CircuitState.CLOSED:
            return Pass(self._era)
        left_s = self._opened_mono + self._policy.cool_down_s - now_mono
        if self.state is CircuitState.OPEN and left_s <= 0:
            self.state = CircuitState.TRIAL
            return Pass(self._era, is_trial=True)
        # While the trial runs nobody knows when it ends: ask again after a part of the cool-down.
        return left_s if left_s > 0 else self._policy.cool_down_s / 10

    def record(self, granted: Pass, result: ExecutionResult | None, now_mono: float) -> CircuitState | None:
        """What came of it; None if nothing did (its caller has gone). Answers the new state if the circuit has opened
        or closed because of it."""
        if granted.era != self._era:
            return None
        verdict = _is_crash(result)
        if verdict is True:
            self._crashes += 1
            if granted.is_trial or self._crashes == self._policy.crashes:
                return self._open(now_mono)
        elif verdict is False:
            self._crashes = 0
            if granted.is_trial:
                self.state = CircuitState.CLOSED
                return self.state
        elif granted.is_trial:
            self.state = CircuitState.OPEN  # the next request is the trial
        return None

    def _open(self, now_mono: float) -> CircuitState | None:
        is_news = self.state is CircuitState.CLOSED
        self.state, self._opened_mono = CircuitState.OPEN, now_mono
        self._crashes = 0
        self._era += 1
        return self.state if is_news else None


def _is_crash(result: ExecutionResult | None) -> bool | None:
    """None: it says nothing about the algorithm."""
    if result is None:
        return None
    if result.error is None or result.error.kind is ErrorKind.RUNTIME:
        return False
    return True if result.error.kind is ErrorKind.SYSTEM else None
