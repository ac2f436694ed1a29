"""What a trial reports: one line of the table."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    promise: str
    trials: int
    failures: list[str] = field(default_factory=list)
    note: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 1000) // 1000) - 1)]
