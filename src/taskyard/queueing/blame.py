"""Which part of a turn is at fault, when a store that answers refuses it.

A turn that is refused may hold one thing that the store cannot take, and everything else in it would never be written.
So what was handed in is sent in parts from then on, then the settles of the refused part one by one, until the store
takes everything again. Whoever sends says what became of it; this only decides what goes next, and what is given up.

Invariants: a settle is given up only after it has failed alone, `STRIKES` times as it was and as often again in words
of ours, each time with the store taking a turn without it right after. Reports are given up when they have been refused
without settles and claims. The suspects are the first of the inbox's settles.
"""

from __future__ import annotations

import logging
from collections import Counter

from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.queueing.inbox import Batch, Inbox

log = logging.getLogger("taskyard")

STRIKES = 3
"""How often a settle must fail alone, with the store answering right after, before it is taken to be at fault."""

REASON_CHARS = 500
"""Of an error that is told in a task's own."""

SETTLES, NEW, CLAIMS = PARTS = range(3)
"""What a turn carries, in the order in which it is sent when it is sent in parts."""


class Blame:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.is_apart = False
        """Whether turns are sent in parts."""
        self.dropped: set[int] = set()
        """Tokens of the settles that were given up: their tasks are still claimed by this node."""
        self._part = CLAIMS
        # Tokens of settles that were refused without anything else in their turn, and have not been taken since.
        self._suspects: set[int] = set()
        self._strikes: Counter[int] = Counter()
        # Of those, the ones that are now to be settled as failed, because their own end could not be stored.
        self._failed: set[int] = set()

    def take_part(self) -> Batch:
        """Settles, what is new, and claims in turn, each without the others: whatever fails, fails alone."""
        inbox = self._inbox
        while True:
            self._part = (self._part + 1) % len(PARTS)
            if self._part == SETTLES:
                if settles := inbox.take_settles(1 if self._suspects else len(inbox.settles)):
                    return Batch(settles)
            elif self._part == NEW:
                if inbox.adds or inbox.reports:
                    return inbox.take_new()
            else:
                return inbox.take_demand()

    def refused(self, batch: Batch, error: Exception) -> bool:
        """The store has not taken this batch, whose settles and reports are back in the inbox. Whether it was a suspect
        all by itself: if the store takes a turn without it, that is a `strike`."""
        if not self.is_apart:
            # The settles go first.
            self.is_apart, self._part = True, CLAIMS
            return False
        if batch.reports:
            log.error("the progress and notes of %d runs cannot be stored", len(batch.reports), exc_info=error)
            self._inbox.drop_reports(batch)
        if not batch.settles:
            return False
        if self._suspects:
            return True
        self._suspects = {claim.token for claim, _ in batch.settles}
        return False

    def strike(self, error: Exception) -> bool:
        """Count it against the first settle that it has failed; the other suspects are next. How it ended may be what
        the store cannot take: the task is failed then, with words of ours; if that cannot be stored either, it is given
        up. Whether it was."""
        settles = self._inbox.settles
        claim, move = settles.pop(0)
        self._strikes[claim.token] += 1
        if self._strikes[claim.token] < STRIKES:
            settles.insert(len(self._suspects) - 1, (claim, move))
            return False
        if claim.token not in self._failed:
            log.error("task %s is failed: that it is %s cannot be stored", claim.uuid, move.state, exc_info=error)
            self._failed.add(claim.token)
            del self._strikes[claim.token]
            settles.insert(len(self._suspects) - 1, (claim, _unstorable(move, error)))
            return False
        self._suspects.discard(claim.token)
        self.dropped.add(claim.token)
        log.error(
            "task %s cannot be settled as %s and stays claimed until this process ends",
            claim.uuid,
            move.state,
            exc_info=error,
        )
        return True

    def taken(self, batch: Batch) -> bool:
        """The store has taken this batch, after others that it had not. Whether it takes all of it again: what it was
        sent apart has gone through, the claims last."""
        if self._suspects:
            self._suspects.difference_update(claim.token for claim, _ in batch.settles)
        if self.is_apart and (self._part != CLAIMS or self._suspects):
            return False
        self.is_apart = False
        self._strikes.clear()
        self._failed.clear()
        return True


def _unstorable(move: Move, error: Exception) -> Move:
    """In plain letters, whatever it is that the store does not take."""
    why = ascii(str(error))[1:-1][:REASON_CHARS]
    message = f"the run ended as {move.state}, which cannot be stored: {why}"
    failure = ExecutionError(kind=ErrorKind.SYSTEM, message=message, types=(type(error).__name__,))
    return Move.failed(at=move.at, error=failure)
