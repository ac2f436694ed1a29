"""What a trial reports: one line of the table."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    """`took` are the times that a promise speaks of, in seconds, `counts` whatever else was counted, and `most` the
    largest of whatever else was measured."""

    promise: str
    trials: int
    failures: list[str] = field(default_factory=list)
    note: str = ""
    took: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    most: dict[str, float] = field(default_factory=dict)

    def measured(self, name: str, value: float) -> None:
        self.most[name] = max(value, self.most.get(name, value))

    def add(self, parts: Iterable["Figures"]) -> None:
        """Trials that were made elsewhere."""
        for part in parts:
            self.trials += part.trials
            self.failures += part.failures
            self.took += part.took
            self.counts += part.counts
            for name, value in part.most.items():
                self.measured(name, value)

    def told(self) -> str:
        """The times and the counts, in words."""
        words = [f"{name} {count}" for name, count in sorted(self.counts.items())]
        words += [f"{name} {value:.2g}" for name, value in sorted(self.most.items())]
        if self.took:
            shares = (("p50", 0.5), ("p99", 0.99))
            times = [f"{name} {percentile(self.took, share) * 1000:.0f} ms" for name, share in shares]
            words = [*times, f"longest {max(self.took) * 1000:.0f} ms of {len(self.took)}", *words]
        return ", ".join(words)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 1000) // 1000) - 1)]
