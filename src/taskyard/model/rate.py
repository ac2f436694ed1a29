"""How often something may happen: a bucket that fills steadily and is emptied by what comes."""

from __future__ import annotations


class TokenBucket:
    """`rate` a second on the long run, `burst` of them at once. Time is whatever the caller says it is."""

    __slots__ = ("_burst", "_filled", "_left", "_rate")

    def __init__(self, rate: float, burst: int | None = None) -> None:
        if not rate > 0 or (burst is not None and burst < 1):
            raise ValueError("rate must be positive, and burst at least 1")
        self._rate = rate
        self._burst = float(burst if burst is not None else max(1, int(rate)))
        self._left = self._burst
        self._filled: float | None = None

    def take(self, now_mono: float) -> float:
        """Take one: 0, or the seconds until there will be one, and then nothing is taken."""
        if self._filled is not None:
            passed_s = max(0.0, now_mono - self._filled)
            self._left = min(self._burst, self._left + passed_s * self._rate)
        self._filled = now_mono
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0.0
