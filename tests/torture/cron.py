"""P10, P21: cron in every time zone around every change of clocks, against an oracle that looks at every minute; and
texts that may be expressions, or not."""

import random
import resource
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

from taskyard.errors import InvalidInput
from taskyard.model.recurrence import Cron, describe, next_fires
from tests.torture.figures import Figures
from tests.unit.cron_oracle import EXPRESSIONS, Minutes, differs, minutes_of, windows
from tests.unit.cron_strings import draw

FIRST_YEAR = 2026

SLOWEST_S = 1.0
"""What takes longer than this to read, to tell and to follow for two fires is as good as a hang."""

MOST_GROWN_MIB = 20
"""What the texts may add to the memory of the process, once a tenth of them has been read."""

NOW = datetime(FIRST_YEAR, 11, 16, tzinfo=UTC)

OF_ONE_MACHINE = {"localtime"}


def run_zones(_folder: Path, *, trials: int, seed: int) -> Figures:
    """Every zone, every change of its clocks in 2026, every expression; then the years after, up to `trials`."""
    figures = Figures("P10 cron where clocks change", 0)
    years: set[int] = set()
    names: set[str] = set()
    for year, name, minutes in _looked():
        for expression in EXPRESSIONS:
            difference = differs(expression, name, minutes)
            figures.trials += 1
            if difference:
                figures.failures.append(difference)
        years.add(year)
        names.add(name)
        if figures.trials >= trials:
            break
    figures.note = f"{len(names)} zones, {len(EXPRESSIONS)} expressions, from {min(years)} to {max(years)}"
    return figures


def _looked() -> Iterator[tuple[int, str, Minutes]]:
    for year in count(FIRST_YEAR):
        for name in sorted(available_timezones() - OF_ONE_MACHINE):
            zone = ZoneInfo(name)
            for begin, end in windows(zone, year):
                yield year, name, minutes_of(zone, begin, end)


def run_strings(_folder: Path, *, trials: int, seed: int) -> Figures:
    """Each text is a rule that fires and can be told, or is refused."""
    figures = Figures("P21 texts as cron expressions", trials)
    chosen, grown = random.Random(seed), _memory_mib()
    for n in range(trials):
        text, began = draw(chosen), time.monotonic()
        try:
            rule = Cron(text, "Europe/Berlin")
            if len(next_fires(rule, after=NOW, count=2)) < 2:
                figures.failures.append(f"{text!r} does not fire")
            describe(rule)
            figures.counts["rules"] += 1
        except InvalidInput:
            figures.counts["refused"] += 1
        except Exception as exc:
            figures.failures.append(f"{text!r}: {exc!r}")
        took = time.monotonic() - began
        figures.measured("slowest s", took)
        if took > SLOWEST_S:
            figures.failures.append(f"{text!r} took {took:.1f} s")
        if n == trials // 10:
            grown = _memory_mib()
    figures.measured("grown MiB", _memory_mib() - grown)
    if figures.most["grown MiB"] > MOST_GROWN_MIB:
        figures.failures.append(f"memory has grown by {figures.most['grown MiB']:.0f} MiB")
    figures.note = figures.told()
    return figures


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
