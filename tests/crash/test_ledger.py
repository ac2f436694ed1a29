"""The checker is what every figure rests on: a history with any one fault in it must turn red."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from taskyard.model.state import TaskState
from taskyard.model.task import Attempt
from taskyard.testing.ledger import LINE, Entry, Ledger, Stored, What, judge
from taskyard.testing.samples import NOON, a_record

A, B = 100, 200  # two processes
S = TaskState


def start(token: int, pid: int = A, *, task: str = "t", attempt: int = 1, key: str | None = None) -> Entry:
    return Entry(what=What.START, task=task, token=token, attempt=attempt, pid=pid, key=key)


def end(token: int, pid: int = A, *, task: str = "t", attempt: int = 1, key: str | None = None) -> Entry:
    return Entry(what=What.END, task=task, token=token, attempt=attempt, pid=pid, key=key)


def ack(task: str = "t") -> Entry:
    return Entry(what=What.ACKNOWLEDGED, task=task)


def kill(pid: int) -> Entry:
    return Entry(what=What.KILL, pid=pid)


def dead(pid: int) -> Entry:
    return Entry(what=What.DEAD, pid=pid)


EXPIRED = Entry(what=What.EXPIRED, pid=A)
STOP = Entry(what=What.STOP, pid=A)
CLASH = Entry(what=What.CLASH, task="t", token=9, pid=B)


def task(
    *runs: tuple[int, int, TaskState], uuid: str = "t", state: TaskState = S.COMPLETED, attempt: int = -1
) -> dict[str, Stored]:
    """What the store says of one task: its runs as (attempt, token, state)."""
    later = NOON + timedelta(seconds=1)
    kept = [
        Attempt(attempt=number, token=token, node="n", state=ended, started_at=NOON, finished_at=later)
        for number, token, ended in runs
    ]
    counted = attempt if attempt >= 0 else (runs[-1][0] if runs else 0)
    return {uuid: Stored(a_record(uuid=uuid, state=state, attempt=counted), kept)}


DONE = (1, 5, S.COMPLETED)
CUT, AGAIN = (1, 5, S.INTERRUPTED), (2, 9, S.COMPLETED)

SOUND = [
    pytest.param([ack(), start(5), end(5)], task(DONE), id="one-run"),
    pytest.param(
        [ack(), start(5), kill(A), dead(A), start(9, B, attempt=2), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        id="killed-while-running",
    ),
    pytest.param(
        [ack(), start(5), kill(A), start(9, B, attempt=2), dead(A), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        id="rescued-before-the-killer-came-to-write",
    ),
    pytest.param(
        [ack(), start(5), end(5), kill(A), dead(A), start(9, B, attempt=2), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        id="killed-before-settling",
    ),
    pytest.param(
        [ack(), kill(A), dead(A), start(9, B, attempt=2), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        id="killed-between-claim-and-start",
    ),
    pytest.param(
        [ack(), start(5), end(5), start(9, attempt=2), end(9, attempt=2)],
        task((1, 5, S.RETRYING), AGAIN),
        id="failed-and-tried-again",
    ),
    pytest.param([STOP, start(5), end(5), start(9), end(9)], task(CUT, (1, 9, S.COMPLETED)), id="given-back-by-a-stop"),
    pytest.param(
        [start(5, key="k"), end(5, key="k"), start(6, task="u", key="k"), end(6, task="u", key="k")],
        task(DONE) | task((1, 6, S.COMPLETED), uuid="u"),
        id="one-key-in-turn",
    ),
    pytest.param(
        [
            start(5),
            EXPIRED,
            CLASH,
            start(9, B, attempt=2),
            end(9, B, attempt=2),
            end(5),
        ],
        task(CUT, AGAIN),
        id="taken-from-a-live-node",
    ),
    pytest.param(
        [start(5), EXPIRED, end(5), CLASH, start(9, B, attempt=2), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        id="taken-from-a-live-node-that-lets-go",
    ),
    pytest.param([ack()], task(state=S.CANCELED), id="canceled-before-it-ran"),
    pytest.param([], task(state=S.CANCELED), id="stored-but-never-acknowledged"),
]

BROKEN = [
    pytest.param([ack()], {}, "acknowledged, and lost", id="lost"),
    pytest.param([start(5), end(5)], {}, "is not in the store", id="ran-but-not-stored"),
    pytest.param([ack()], task(state=S.QUEUED), "has not ended", id="never-ends"),
    pytest.param([start(5), end(5)], task(CUT, state=S.RUNNING), "has not ended", id="stays-running"),
    pytest.param(
        [start(5), start(9, B, attempt=2), end(5), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        "while token 5 was running",
        id="two-live-runs",
    ),
    pytest.param(
        [start(5), start(9, attempt=2), end(5), end(9, attempt=2)],
        task(CUT, AGAIN),
        "while token 5 was running",
        id="two-live-runs-in-one-process",
    ),
    pytest.param(
        [start(5), kill(B), dead(B), start(9, B, attempt=2), end(5), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        "while token 5 was running",
        id="another-process-was-killed",
    ),
    pytest.param(
        [start(5), start(9, B, attempt=2), kill(A), dead(A), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        "while token 5 was running",
        id="killed-after-the-second-run-began",
    ),
    pytest.param(
        [
            start(5),
            kill(A),
            CLASH,
            start(9, B, attempt=2),
            dead(A),
            end(9, B, attempt=2),
        ],
        task(CUT, AGAIN),
        "held the task's lock",
        id="not-yet-dead",
    ),
    pytest.param(
        [start(5), end(5), CLASH, start(9, B, attempt=2), end(9, B, attempt=2)],
        task((1, 5, S.RETRYING), AGAIN),
        "held the task's lock",
        id="held-by-nobody-that-was-stale",
    ),
    pytest.param(
        [
            start(5),
            EXPIRED,
            end(5),
            start(9, B, attempt=2),
            end(9, B, attempt=2),
            msgspec.structs.replace(CLASH, token=12),
            start(12, attempt=3),
            end(12, attempt=3),
        ],
        task(CUT, (2, 9, S.RETRYING), (3, 12, S.COMPLETED)),
        "held the task's lock",
        id="let-go-long-ago",
    ),
    pytest.param(
        [EXPIRED, start(5), start(9, B, attempt=2), end(5), end(9, B, attempt=2)],
        task(CUT, AGAIN),
        "while token 5 was running",
        id="expired-before-it-started",
    ),
    pytest.param(
        [start(9), end(9), start(5, attempt=2), end(5, attempt=2)],
        task((1, 9, S.RETRYING), (2, 5, S.COMPLETED)),
        "token 5 started after token 9",
        id="token-went-back",
    ),
    pytest.param(
        [start(5), end(5), start(5, attempt=2), end(5, attempt=2)],
        task((1, 5, S.RETRYING), (2, 5, S.COMPLETED)),
        "token 5 started after token 5",
        id="token-used-twice",
    ),
    pytest.param(
        [start(5), end(5), start(5, task="u"), end(5, task="u")],
        task(DONE) | task(DONE, uuid="u"),
        "was given to task",
        id="token-of-two-tasks",
    ),
    pytest.param([start(5)], task(DONE), "neither ended nor died", id="a-run-left-behind"),
    pytest.param([end(5)], task(DONE), "without having started", id="an-end-without-a-start"),
    pytest.param([ack()], task(DONE), "and never ended", id="completed-by-nobody"),
    pytest.param(
        [start(5), kill(A), dead(A)],
        task(DONE),
        "is recorded as completed, and never ended",
        id="completed-by-the-dead",
    ),
    pytest.param(
        [start(5), end(5), start(9, attempt=2), end(9, attempt=2)],
        task((2, 9, S.COMPLETED)),
        "token 5 is not recorded",
        id="a-run-not-recorded",
    ),
    pytest.param(
        [start(5), end(5), start(9, attempt=2), end(9, attempt=2)],
        task(DONE, AGAIN),
        "after it had completed",
        id="completed-twice",
    ),
    pytest.param([start(5), end(5)], task((2, 5, S.COMPLETED)), "is recorded as attempt 2", id="another-attempt"),
    pytest.param([start(5), end(5)], task(DONE, attempt=3), "counts 3 attempts", id="attempts-miscounted"),
    pytest.param(
        [start(5), end(5), start(9), end(9)],
        task(CUT, (1, 9, S.COMPLETED)),
        "is recorded where 2 was due",
        id="an-attempt-given-back-by-nobody",
    ),
    pytest.param(
        [start(5), end(5)], task(CUT), "its last run is recorded as interrupted", id="completed-without-a-completed-run"
    ),
    pytest.param(
        [start(5, key="k"), start(6, B, task="u", key="k"), end(5, key="k"), end(6, B, task="u", key="k")],
        task(DONE) | task((1, 6, S.COMPLETED), uuid="u"),
        "under the same key",
        id="one-key-twice-at-once",
    ),
]


@pytest.mark.parametrize(("entries", "stored"), SOUND)
def test_a_sound_history_passes(entries: list[Entry], stored: dict[str, Stored]) -> None:
    """What kills, rescues, retries and stops rightly leave behind is not blamed."""
    assert judge(entries, stored) == []


@pytest.mark.parametrize(("entries", "stored", "blame"), BROKEN)
def test_a_broken_history_turns_red(entries: list[Entry], stored: dict[str, Stored], blame: str) -> None:
    """Every fault the checker is for is found and named."""
    assert any(blame in fault for fault in judge(entries, stored)), judge(entries, stored)


class Running:
    """As much of a run as the ledger looks at."""

    def __init__(self, uuid: str, token: int) -> None:
        self.task = a_record(uuid=uuid)
        self.uuid, self.attempt, self.token = uuid, 1, token


UUID = "019a0000-0000-7000-8000-000000000001"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger", dying_s=0.3)
    yield ledger
    ledger.close()


def test_a_run_writes_its_start_and_its_end(ledger: Ledger) -> None:
    """A run stands in the ledger with its start and how it ended, whichever way that was."""
    with ledger.run(Running(UUID, 5)):  # type: ignore[arg-type]
        pass
    with pytest.raises(KeyError), ledger.run(Running(UUID, 6)):  # type: ignore[arg-type]
        raise KeyError
    told = [(entry.what, entry.token, entry.note) for entry in ledger.entries()]
    assert told == [("start", 5, ""), ("end", 5, "done"), ("start", 6, ""), ("end", 6, "KeyError")]
    assert ledger.path.stat().st_size == 4 * LINE


HOLD = """
import sys
from tests.crash.test_ledger import Ledger, Running
with Ledger(sys.argv[1]).run(Running(sys.argv[2], 5)):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(ledger: Ledger) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process inside a run of the task; it ends by itself when this one does."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(ledger.path), UUID], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"in\n"
    yield child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_a_second_run_beside_a_live_one_is_a_clash(ledger: Ledger, hold: "subprocess.Popen[bytes]") -> None:
    """A run that starts while another process is still inside the task says so, whatever the store believes."""
    with ledger.run(Running(UUID, 9)):  # type: ignore[arg-type]
        pass
    assert What.CLASH in [entry.what for entry in ledger.entries()]


def test_a_dead_run_clashes_with_nobody(ledger: Ledger, hold: "subprocess.Popen[bytes]") -> None:
    """The lock of a run is gone with its process, even when nobody has noted the death yet."""
    os.kill(hold.pid, 9)
    with ledger.run(Running(UUID, 9)):  # type: ignore[arg-type]
        pass
    assert [entry.what for entry in ledger.entries()] == ["start", "start", "end"]


def test_a_torn_ledger_proves_nothing(ledger: Ledger) -> None:
    """A ledger that is not made of whole lines is refused rather than read."""
    ledger.acknowledged(UUID)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="torn"):
        ledger.entries()
