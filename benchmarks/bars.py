"""What has to be reached: every bar, in one place, as data."""

from dataclasses import dataclass
from enum import Enum


class Sense(Enum):
    AT_LEAST = "≥"
    AT_MOST = "≤"


class Relation(Enum):
    RATIO = "ratio"  # ours ÷ other, round by round
    GROWTH = "growth"  # ours − other, round by round


@dataclass(frozen=True, slots=True)
class Bar:
    sense: Sense
    value: float
    relation: Relation = Relation.RATIO

    def is_met_by(self, value: float) -> bool:
        if self.sense is Sense.AT_LEAST:
            return value >= self.value
        return value <= self.value


def at_least(ratio: float) -> Bar:
    return Bar(Sense.AT_LEAST, ratio)


def at_most(ratio: float) -> Bar:
    return Bar(Sense.AT_MOST, ratio)


def grows_at_most(value: float) -> Bar:
    return Bar(Sense.AT_MOST, value, Relation.GROWTH)


PROCESS_PEERS = ("run_in_executor", "pebble", "loky", "multiprocessing.Pool", "anyio.to_process")
POSTGRES_PEERS = ("PgQueuer", "Procrastinate")

# By scenario and by the name of the side that ours is held against.
BARS: dict[tuple[str, str], Bar] = {
    ("memory", "taskiq"): at_least(2.2),
    ("memory", "huey"): at_least(1.3),
    ("memory", "bare loop"): at_least(0.4),
    ("drain", "huey"): at_least(14),
    ("drain", "raw claim 100 + complete 100"): at_least(0.22),
    ("clients", "raw insert, one per commit"): at_least(5),
    ("batch", "raw insert, 1,000 per commit"): at_least(0.35),
    ("idle", "one raw commit"): at_most(1.5),
    ("lateness", "call_at + one raw commit"): at_most(1.5),
    ("claim", "1,000 queued"): at_most(2),
    ("claims_mixed", "plain"): at_most(3),
    ("moves", "1,000 queued"): at_most(2),
    ("bulk", "without it"): at_least(0.5),
    ("blockers", "without"): at_most(1.5),
    ("pg_blockers", "without"): at_most(1.5),
    ("backlog", "empty"): grows_at_most(50e6),
    ("pg_drain", "PgQueuer"): at_least(1.7),
    ("pg_drain", "Procrastinate"): at_least(10),
    ("pg_drain", "raw claim 100 + complete 100"): at_least(0.5),
    ("pg_clients", "raw insert, 16 connections"): at_least(0.6),
    **{("pg_clients", peer): at_least(2) for peer in POSTGRES_PEERS},
    ("pg_batch", "raw unnest of 1,000"): at_least(0.4),
    **{("pg_batch", peer): at_least(1.5) for peer in POSTGRES_PEERS},
    ("pg_idle", "raw NOTIFY + one raw claim"): at_most(1.5),
    ("pg_idle", "raw NOTIFY + one raw claim, two processes"): at_most(1.5),
    ("pg_nodes", "one node"): at_least(0.8),
    ("pg_claim", "empty"): at_most(2),
    ("pg_backlog", "empty"): at_least(0.5),
    ("import", "saq"): at_most(1.2),
    ("call", "anyio.to_process"): at_most(0.8),
    ("call", "raw socketpair + pickle"): at_most(3),
    ("parallel", "run_in_executor"): at_least(2),
    ("parallel", "pebble"): at_least(2),
    ("pipelined", "multiprocessing.Pool"): at_least(1.3),
    **{("megabyte", peer): at_least(1.5) for peer in PROCESS_PEERS},
    **{("array", peer): at_least(3) for peer in PROCESS_PEERS},
    ("hung", "pebble"): at_most(0.25),
    ("hung", "anyio.to_process"): at_most(0.25),
    ("lag", "threads"): at_most(0.2),
    ("device_hang", "without it"): at_least(0.95),
    ("device_outage", "a heartbeat"): grows_at_most(1.0),
    ("device_start", "submit → a plain function in a thread"): at_most(1.3),
    ("device_farm", "a core"): at_most(0.05),
    ("adb", "adbutils"): at_most(1.15),
}
