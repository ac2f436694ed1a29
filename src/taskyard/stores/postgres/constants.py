"""Numbers and names that the SQL of PostgreSQL and Python share, and what `{{name}}` stands for in the SQL bundle.

Structural constants describe stored data or an agreement between nodes of different versions. They never change for an
existing database: `GAP` (stored positions), the numbers of `Lock`, `EVENTS_AT_MOST` (numbers of events), `SEPARATOR`,
`LANE_SEPARATOR` (stored lanes) and `CHANNEL`. Every other constant may change: the rendered bundle then changes, and
needs a new `bundle/VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from taskyard.model.attempt import LINES_KEPT
from taskyard.model.blocker import SEPARATOR as LANE_SEPARATOR
from taskyard.model.catalogue import SPEC_KEPT
from taskyard.model.dependency import DEPENDENCY_FAILED
from taskyard.model.device import NOT_CHECKED, NOT_SERVED
from taskyard.model.order import GAP
from taskyard.model.places import CROWDED, SHARE, SMALLEST, THINNING
from taskyard.model.state import TaskState, sql_guard
from taskyard.model.task import FIRST, LAST
from taskyard.ports.store import ATTEMPTS_KEPT, PROMOTE_AT_MOST
from taskyard.stores.plan import RELEASE_AT_MOST
from taskyard.stores.records import CARRIED_FIELDS, COMPLETED_FIELDS


class Lock(IntEnum):
    """Advisory locks: the first of their two numbers. The lock order is in `sql/bundle/locks.sql`."""

    QUEUE = 1953721201
    """Of a queue: every writer takes it before it changes the queue. Completing plain runs does not need it."""
    COMPLETIONS = 1953721209
    """Of a queue, after `QUEUE`. Completing plain runs takes it shared. Claiming, submitting and promoting do not take
    it. Every other writer takes it exclusively."""
    NODE = 1953721202
    EVENTS = 1953721203
    """Every transaction that may write events or counts shares it."""
    OPEN_SLOT = 1953721204
    """Of a dedupe slot: held while a user's transaction is open that took the slot."""
    BULK_SLOTS = 1953721211
    """Shared while a user's transaction is open that took too many slots to lock each of them."""
    SLOT = 1953721205
    COMPACTION = 1953721206
    MIGRATING = 1953721207
    ROLLOUT = 1953721212
    """Of a queue, before `QUEUE`: held for one step of the rollout of its settings."""
    NUMBER_SKIP = 1953721210
    CATALOGUE = 1953721213
    """Held by the one transaction that writes specifications of consumers."""
    DEVICES = 1953721214
    """Held by the one transaction that writes devices, after all other locks."""
    HINT = 1953721208
    """Held by the one transaction that notifies other nodes with its commit."""


EVENTS_AT_MOST = 1 << 17
"""Events of one transaction: an event's number is that of its transaction times this, plus its place in it."""

SEPARATOR = chr(30)
"""Between texts that are sent as one: a control character, which JSON never has and an id must not have."""

CHANNEL = "taskyard"
"""The channel of NOTIFY."""

INSERT_BLOCKED = "TY001"
"""The SQLSTATE of an insert that would wait for a transaction that somebody keeps open."""

NO_PLACE = "TY002"
"""The SQLSTATE of a move for which there is no position left between two tasks."""

RAISE_AFTER = 500 * GAP
"""How far claims must be beyond a lane's watermark before it is raised: about 250 tasks, of two numbers each."""

RAISE_ONE_IN = 16
"""A claim of one task checks the watermark once in so many times, a claim of more tasks more often."""

READ_AHEAD = 16
"""Tasks of a lane that a claim over several priorities reads at once: there may be many lanes, and it takes few."""

LOCKED_AT_MOST = 1000
"""Slots of one submit, or queues of one exchange, that are locked one by one: a server has room for some thousands."""

RULED_AT_MOST = 1000
"""Tasks, or keys, that one rollout step changes: nothing of the queue starts meanwhile."""

LOOKED_AT_MOST = 20_000
"""Tasks of all queues that one rollout step reads."""

LANES_KEPT = 100
"""Reading so many lanes takes less than a millisecond. If there are more, empty ones are dropped."""

NUMBERS_SKIPPED = 10_000_000
"""Numbers that are skipped after a failover: far more than a server can have handed out without its successor knowing,
and a millionth of all."""

HIGHEST = 2**63 - 1
"""No id is above it."""

LONGEST_NAME_BYTES = 1200
"""Of an indexed text. Most indexes have two of them, and PostgreSQL takes about 2,700 bytes for both."""

LOWEST = -(2**62)
"""Below every position in practice; the difference of a position and this one still has 64 bits."""


def bundle_values() -> Mapping[str, str]:
    """What `{{name}}` stands for in the bundle. Read when it is rendered, so that a test may change a constant."""
    return {
        "created": TaskState.CREATED,
        "spec_kept_s": str(int(SPEC_KEPT.total_seconds())),
        "illegal_move": sql_guard("v_old", "NEW.state").replace("instr(", "strpos("),
        "gap": str(GAP),
        "promote_at_most": str(PROMOTE_AT_MOST),
        "attempts_kept": str(ATTEMPTS_KEPT),
        "lines_kept": str(LINES_KEPT),
        "events_at_most": str(EVENTS_AT_MOST),
        "raise_after": str(RAISE_AFTER),
        "raise_one_in": str(RAISE_ONE_IN),
        "read_ahead": str(READ_AHEAD),
        "carried_columns": ", ".join(CARRIED_FIELDS),
        "completed_columns": ", ".join(COMPLETED_FIELDS),
        "completed_columns_of_t": ", ".join(f"t.{name}" for name in COMPLETED_FIELDS),
        "dependency_failed": DEPENDENCY_FAILED,
        "not_served": NOT_SERVED,
        "not_checked": NOT_CHECKED,
        "lowest": str(LOWEST),
        "highest": str(HIGHEST),
        "lanes_kept": str(LANES_KEPT),
        "ruled_at_most": str(RULED_AT_MOST),
        "looked_at_most": str(LOOKED_AT_MOST),
        "smallest": str(SMALLEST),
        "crowded": str(CROWDED),
        "thinning": str(THINNING),
        "share": str(SHARE),
        "release_at_most": str(RELEASE_AT_MOST),
        "locked_at_most": str(LOCKED_AT_MOST),
        "channel": CHANNEL,
        "first": FIRST.isoformat(),
        "last": LAST.isoformat(),
        "numbers_skipped": str(NUMBERS_SKIPPED),
        "longest_name": str(LONGEST_NAME_BYTES),
        "insert_blocked": f"'{INSERT_BLOCKED}'",
        "no_place": f"'{NO_PLACE}'",
        "separator": f"chr({ord(SEPARATOR)})",
        "lane_separator": f"chr({ord(LANE_SEPARATOR)})",
    } | {f"lock_{lock.name.lower()}": str(int(lock)) for lock in Lock}
