"""What a scenario found out: ours beside one other side, judged by its bar."""

import statistics
from dataclasses import dataclass

from benchmarks.bars import Bar, Relation
from benchmarks.reading import Unit, format_value


@dataclass(frozen=True, slots=True)
class Finding:
    """Readings of the same rounds, ours and the other's, in order. Without a bar it informs and judges nothing."""

    scenario: str
    against: str
    unit: Unit
    ours: list[float]
    other: list[float]
    bar: Bar | None

    @property
    def _relation(self) -> Relation:
        return self.bar.relation if self.bar else Relation.RATIO

    @property
    def per_round(self) -> list[float]:
        pairs = zip(self.ours, self.other, strict=True)
        if self._relation is Relation.GROWTH:
            return [mine - theirs for mine, theirs in pairs]
        return [mine / theirs for mine, theirs in pairs]

    @property
    def is_met(self) -> bool | None:
        if self.bar is None or not self.ours:
            return None
        return self.bar.is_met_by(statistics.median(self.per_round))

    def cells(self) -> list[str]:
        """scenario, ours, the other, the ratio with its spread, the bar, and whether it is met."""
        other = f"{self._median_of(self.other)} ({self.against})"
        met = {True: "yes", False: "**no**", None: "–"}[self.is_met]
        return [self.scenario, self._median_of(self.ours), other, self._ratio_cell(), self._bar_cell(), met]

    def _median_of(self, values: list[float]) -> str:
        return format_value(statistics.median(values), self.unit) if values else "–"

    def _ratio_cell(self) -> str:
        if not self.ours:
            return "–"
        low, middle, high = min(self.per_round), statistics.median(self.per_round), max(self.per_round)
        return f"{self._figure(middle)} ({self._figure(low)} … {self._figure(high)})"

    def _bar_cell(self) -> str:
        return f"{self.bar.sense.value} {self._figure(self.bar.value)}" if self.bar else "–"

    def _figure(self, value: float) -> str:
        if self._relation is Relation.GROWTH:
            return format_value(value, self.unit)
        return f"{value:.3g} ×"
