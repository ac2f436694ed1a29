"""Who is at fault when a store refuses a turn, decided without a store: what is sent next, and what is given up."""

from collections.abc import Callable

import pytest

from taskyard.model.execution import ErrorKind
from taskyard.model.move import Move
from taskyard.model.notes import Note
from taskyard.model.task import Claim
from taskyard.ports.store import Report
from taskyard.queueing.blame import STRIKES, Blame
from taskyard.queueing.capacity import Slots
from taskyard.queueing.inbox import Batch, Inbox
from taskyard.stores.memory import MemoryStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, an_add

REFUSED = ValueError("no such letter: \N{SNOWMAN}")


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(MemoryStore(ManualClock()), Slots({}, max_running=10, others=10))


@pytest.fixture
def blame(inbox: Inbox) -> Blame:
    return Blame(inbox)


def end(inbox: Inbox, *tokens: int) -> None:
    """The runs with these tokens have ended."""
    inbox.settles += [(Claim(a_record(), 1, token), Move.completed(at=NOON)) for token in tokens]


def send(inbox: Inbox, blame: Blame, *, refuses: Callable[[Batch], bool], is_up: bool = True) -> Batch:
    """One turn with a store that refuses some batches, and takes the empty turn after one if it is up."""
    batch = blame.take_part() if blame.is_apart else inbox.take()
    if not refuses(batch):
        blame.taken(batch)
        return batch
    inbox.put_back(batch)
    if blame.refused(batch, REFUSED) and is_up:
        blame.strike(REFUSED)
    return batch


def settled(batch: Batch) -> list[int]:
    return [claim.token for claim, _ in batch.settles]


def everything(_: Batch) -> bool:
    return True


def nothing(_: Batch) -> bool:
    return False


def the_first(batch: Batch) -> bool:
    return 1 in settled(batch)


def completed(batch: Batch) -> bool:
    return any(move.error is None for _, move in batch.settles)


async def test_what_was_refused_is_sent_in_parts(inbox, blame):
    """After a refusal the settles go alone, then what is new, then what there is room for, then everything together."""
    end(inbox, 1)
    send(inbox, blame, refuses=everything)
    inbox.report(Report(Claim(a_record(), 1, 2), note=Note.remark("going on")))
    inbox.add(an_add(a_record()))
    parts = [send(inbox, blame, refuses=nothing) for _ in range(3)]
    carried = [(len(part.settles), len(part.adds), len(part.reports), part.demand is not None) for part in parts]
    assert carried == [(1, 0, 0, False), (0, 1, 1, False), (0, 0, 0, True)]
    assert not blame.is_apart


def test_settles_that_were_refused_go_one_by_one(inbox, blame):
    """Of settles that were refused together each is tried alone, in turn, and those behind the one at fault are not
    kept waiting for its strikes."""
    end(inbox, 1, 2, 3)
    sent = [settled(send(inbox, blame, refuses=the_first)) for _ in range(12)]
    assert [part for part in sent if part][:5] == [[1, 2, 3], [1, 2, 3], [1], [2], [3]]


def test_an_end_that_cannot_be_stored_is_told_in_plain_letters(inbox, blame):
    """A settle that has failed alone often enough is sent as a failure that says why, in letters that any store takes,
    and with that it is over."""
    end(inbox, 1)
    sent = [send(inbox, blame, refuses=completed)]
    while blame.is_apart:
        sent.append(send(inbox, blame, refuses=completed))
    *refused, last = [move for batch in sent for _, move in batch.settles]
    assert len(refused) == 2 + STRIKES  # with everything, with other settles, alone
    assert last.error is not None
    assert last.error.kind is ErrorKind.SYSTEM
    assert last.error.message == r"the run ended as completed, which cannot be stored: no such letter: \u2603"
    assert (inbox.settles, blame.dropped) == ([], set())


def test_what_cannot_be_stored_either_way_is_given_up(inbox, blame):
    """A settle that fails alone as it is, and again as a failure, is given up; one that ended after it is not."""
    end(inbox, 1)
    sent = [settled(send(inbox, blame, refuses=the_first))]
    end(inbox, 2)
    while blame.is_apart:
        sent.append(settled(send(inbox, blame, refuses=the_first)))
    assert sent.count([1]) == 1 + 2 * STRIKES
    assert sent.count([2]) == 1
    assert (inbox.settles, blame.dropped) == ([], {1})


def test_a_store_that_takes_nothing_is_at_fault_itself(inbox, blame):
    """However often a settle is refused alone, it is kept as it is while the store takes no turn without it either."""
    end(inbox, 1)
    kept = list(inbox.settles)
    for _ in range(20 * STRIKES):
        send(inbox, blame, refuses=everything, is_up=False)
    assert (inbox.settles, blame.dropped) == (kept, set())
