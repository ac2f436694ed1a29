"""The common shape of a scenario: ours against others in turn, one finding for each of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bars import BARS
from benchmarks.finding import Finding
from benchmarks.reading import Reading, Unit
from benchmarks.sides import Side, read_in_turn


@dataclass(frozen=True, slots=True)
class Settings:
    """How thorough a run is, and whether ours takes part."""

    quick: bool = False
    without_ours: bool = False

    @property
    def rounds(self) -> int:
        return self.pick(full=5, quick=3)

    def pick(self, *, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Contest:
    """`key` finds the bars, `title` is what the table says."""

    key: str
    title: str
    unit: Unit
    ours: Side
    others: Sequence[Side]

    def hold(self, settings: Settings) -> list[Finding]:
        return self.judge(read_in_turn(self.sides(settings), rounds=settings.rounds))

    def sides(self, settings: Settings) -> list[Side]:
        return [*self.others] if settings.without_ours else [self.ours, *self.others]

    def judge(self, readings: dict[str, list[Reading]]) -> list[Finding]:
        ours = [reading.value for reading in readings.get(self.ours.name, [])]
        return [self._against(other.name, ours, readings) for other in self.others]

    def _against(self, name: str, ours: list[float], readings: dict[str, list[Reading]]) -> Finding:
        other = [reading.value for reading in readings[name]]
        return Finding(self.title, name, self.unit, ours, other, BARS.get((self.key, name)))


def hold_together(contests: Sequence[Contest], settings: Settings) -> list[Finding]:
    """All their sides take turns in the same rounds; a side that takes part in several is read once a round."""
    sides = {side.name: side for contest in contests for side in contest.sides(settings)}
    readings = read_in_turn([*sides.values()], rounds=settings.rounds)
    return [finding for contest in contests for finding in contest.judge(readings)]
