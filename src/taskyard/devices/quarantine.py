"""Which accounts are quarantined: those of which the last runs of a consumer have all failed."""

from __future__ import annotations

import logging
from datetime import datetime

from taskyard.devices.roster import Roster
from taskyard.model.audit import AuditFilter, TargetKind
from taskyard.model.device import QuarantinedAccount, RunFilter
from taskyard.model.notes import AuditStamp
from taskyard.model.state import TaskState
from taskyard.ports.clock import Clock
from taskyard.ports.device import DeviceStore
from taskyard.ports.store import Store

log = logging.getLogger("taskyard.devices")

READ_PER_RUN = 4
"""Runs read for each that counts: those that were canceled or interrupted say nothing of the account."""

AUDIT_READ = 50
"""Entries of the audit record that are read for the last release of an account."""


STREAKS_KEPT = 10_000
"""Pairs of an account and a consumer whose failures in a row are counted here: about 2 MB."""


class AccountWatch:
    """Looks at an account and a consumer after a run of theirs has failed. `after` runs in a row make a quarantine;
    None makes none.

    Only the store knows all runs, and to ask it after each failure is expensive. While no other node serves a device,
    the failures in a row are counted here, from the first one that the store was asked about."""

    def __init__(self, pool: str, after: int | None, clock: Clock) -> None:
        self._pool, self._after, self._clock = pool, after, clock
        self._noted: dict[tuple[str, str], None] = {}
        self._counted: dict[tuple[str, str], None] = {}
        """Pairs of which a failure was only counted, since the last look."""
        self._streaks: dict[tuple[str, str], int] = {}
        """At least as many failures in a row as there are. A pair that is missing is asked for."""
        self._released: dict[tuple[str, str], datetime] = {}
        self._known: frozenset[tuple[str, str]] = frozenset()

    def note_failure(self, account: str, consumer: str) -> bool:
        """The store has taken a failed run of this account and consumer. Whether to look."""
        if self._after is None:
            return False
        pair = account, consumer
        if pair in self._streaks:
            self._streaks[pair] += 1
            if self._streaks[pair] < self._after:
                self._counted[pair] = None
                return False
        self._noted[pair] = None
        return True

    def note_success(self, account: str, consumer: str) -> None:
        """The same for one that completed."""
        if (account, consumer) in self._streaks:
            self._streaks[account, consumer] = 0

    async def look(self, store: DeviceStore, roster: Roster, *, node: str, by: str) -> None:
        """Quarantine those that are to be. What the store does not take is kept for the next look."""
        for pair in self._known - roster.quarantined:
            self._released[pair] = self._clock.now()
        self._known = roster.quarantined
        is_alone = all(one.node in ("", node) for one in roster.devices)
        counted, self._counted = self._counted, {}
        if not is_alone:
            self._noted |= counted  # another node may have come before they were counted
        if not is_alone or len(self._streaks) > STREAKS_KEPT:
            self._streaks.clear()
        for pair in list(self._noted):
            if pair not in roster.quarantined:
                # Race: a run may fail while the store is asked. It is counted twice rather than not at all.
                self._streaks[pair] = 0
                failures = await self._judge(store, *pair, by=by)
                self._streaks[pair] += failures
                if failures < (self._after or 0) <= self._streaks[pair]:
                    continue  # the next look finds out
                if not is_alone:
                    del self._streaks[pair]
            self._noted.pop(pair, None)

    async def _judge(self, store: DeviceStore, account: str, consumer: str, *, by: str) -> int:
        """Quarantine them if they have failed so often. How many failures in a row there are, as far as was read."""
        assert self._after is not None
        since = await self._find_release(store, account, consumer)
        where = RunFilter(pool=self._pool, account=account, consumer=consumer, since=since)
        runs = await store.list_device_runs(where, limit=self._after * READ_PER_RUN)
        outcomes = [run.outcome for _, run in runs if run.outcome in (TaskState.FAILED, TaskState.COMPLETED)]
        failures = next((n for n, one in enumerate(outcomes) if one != TaskState.FAILED), len(outcomes))
        if failures < self._after:
            return failures
        reason = f"its last {failures} runs failed"
        log.warning("account %s is quarantined for %s: %s", account, consumer, reason, extra={"account": account})
        await store.quarantine_account(
            QuarantinedAccount(
                pool=self._pool,
                account=account,
                consumer=consumer,
                failures=failures,
                quarantined=AuditStamp(by, self._clock.now(), reason),
            )
        )
        return failures

    async def _find_release(self, store: DeviceStore, account: str, consumer: str) -> datetime | None:
        """When a person has released them last: seen by this process, or kept in the audit record."""
        found = [] if (seen := self._released.get((account, consumer))) is None else [seen]
        if isinstance(store, Store):
            where = AuditFilter(commands=("release_account",), kinds=(TargetKind.ACCOUNT,), target=account)
            for entry in await store.list_audit(where, limit=AUDIT_READ):
                of = entry.details
                if of.get("pool") == self._pool and of.get("consumer") in (None, consumer):
                    found.append(entry.at)
                    break
        return max(found, default=None)
