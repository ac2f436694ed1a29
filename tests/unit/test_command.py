"""What a person asks, decided for every state."""

import pytest

from taskyard.errors import CommandRefused
from taskyard.model.command import AskCancel, Cancel, Command, Reprioritize, Retry, SetPriority, apply_decision, decide
from taskyard.model.execution import ErrorKind
from taskyard.model.move import Move, apply_move
from taskyard.model.order import Priority
from taskyard.model.state import ENDED, TaskState
from taskyard.testing.samples import NOON, a_record, seconds

LATER = NOON + seconds(1)

WAITS = {
    TaskState.CREATED,
    TaskState.SCHEDULED,
    TaskState.QUEUED,
    TaskState.BLOCKED,
    TaskState.PAUSED,
    TaskState.RETRYING,
    TaskState.INTERRUPTED,
}


def allowed(state: TaskState, command: Command) -> bool:
    match command:
        case Cancel():
            return state in WAITS or state is TaskState.RUNNING
        case Retry():
            return state is TaskState.FAILED
        case SetPriority():
            return state in WAITS


COMMANDS = [Cancel("no need"), Retry(to_head=True), Retry(to_head=False), SetPriority(Priority.HIGH)]


@pytest.mark.spec("QUE-01")
@pytest.mark.parametrize("state", TaskState)
@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_every_command_is_decided_in_every_state(state: TaskState, command: Command):
    """A command either leads to a legal change, or is refused with the state it found, and deciding changes nothing."""
    record, untouched = a_record(uuid="u", state=state), a_record(uuid="u", state=state)
    if allowed(state, command):
        decision = decide(record, command, now=LATER)
        assert record == untouched
        if isinstance(decision, Move):
            apply_move(record, decision)
        else:
            apply_decision(record, decision)
        assert record.updated_at == LATER
    else:
        with pytest.raises(CommandRefused) as refused:
            decide(record, command, now=LATER)
        assert (refused.value.uuid, refused.value.state) == ("u", state)
        assert record == untouched


@pytest.mark.spec("QUE-11")
@pytest.mark.parametrize("state", sorted(WAITS))
def test_cancel_ends_what_waits(state: TaskState):
    """What has not started is canceled at once, with the reason given."""
    decision = decide(a_record(state=state), Cancel("no need"), now=LATER)
    assert isinstance(decision, Move)
    assert (decision.state, decision.at) == (TaskState.CANCELED, LATER)
    assert decision.error is not None
    assert (decision.error.kind, decision.error.message) == (ErrorKind.CANCELED, "no need")


@pytest.mark.spec("QUE-12")
def test_cancel_asks_what_runs():
    """What runs is asked to stop and goes on running; asking twice keeps the time of the first."""
    record = a_record(state=TaskState.RUNNING)
    for at in (LATER, LATER + seconds(5)):
        decision = decide(record, Cancel(), now=at)
        assert isinstance(decision, AskCancel)
        apply_decision(record, decision)
    assert (record.state, record.cancel_asked_at) == (TaskState.RUNNING, LATER)


@pytest.mark.parametrize("to_head", [True, False])
def test_retry_queues_a_failed_task_where_asked(to_head: bool):
    """A failed task goes back to its queue, at the head or at the tail as asked."""
    decision = decide(a_record(state=TaskState.FAILED), Retry(to_head=to_head), now=LATER)
    assert isinstance(decision, Move)
    assert (decision.state, decision.to_head) == (TaskState.QUEUED, to_head)


@pytest.mark.parametrize("state", [state for state in TaskState if state is not TaskState.FAILED])
def test_a_refused_retry_says_what_to_do(state: TaskState):
    """A retry that does not fit says whether to wait or to submit anew."""
    with pytest.raises(CommandRefused, match="submit a new one" if state in ENDED else "not ended yet"):
        decide(a_record(state=state), Retry(), now=LATER)


@pytest.mark.spec("QUE-05")
def test_set_priority_changes_only_the_priority():
    """Changing the priority of a waiting task leaves its state as it is."""
    record = a_record(state=TaskState.QUEUED)
    decision = decide(record, SetPriority(Priority.LOW), now=LATER)
    assert isinstance(decision, Reprioritize)
    apply_decision(record, decision)
    assert (record.state, record.priority) == (TaskState.QUEUED, Priority.LOW)
