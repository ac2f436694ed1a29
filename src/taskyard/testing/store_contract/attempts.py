"""Attempts as things of their own: who runs one, its log lines, its artifacts."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

import msgspec
import pytest

from taskyard.model.attempt import (
    ARTIFACT_DATA_BYTES,
    LINES_KEPT,
    Artifact,
    AttemptArtifact,
    AttemptLine,
    LogLine,
    dropped_line,
)
from taskyard.model.command import Cancel, Retry
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Claim
from taskyard.ports.store import ATTEMPTS_KEPT, Report, Store
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_record, an_error
from taskyard.testing.store_contract.desk import A, B, Desk, add, claim, get, settle, start, tick

WORKER, OTHER_WORKER = 4242, 4243


def a_line(number: int, text: str | None = None) -> LogLine:
    """The line that was written so many milliseconds after noon."""
    return LogLine(NOON + timedelta(milliseconds=number), "info", text or f"line {number}", "run")


def an_artifact(name: str, data: bytes = b"data", at: datetime = NOON) -> Artifact:
    return Artifact(name, len(data), hashlib.sha256(data).hexdigest(), "application/octet-stream", at, data=data)


def a_file(name: str) -> Artifact:
    return Artifact(name, 10**12, "ab" * 32, "video/mp4", NOON, host="here", path=f"/artifacts/{name}")


async def say(store: Store, held: Claim, *lines: LogLine, node: str = A) -> None:
    await store.turn(node, reports=[Report(held, lines=lines)])


async def keep(store: Store, held: Claim, *artifacts: Artifact) -> None:
    await store.turn(A, reports=[Report(held, artifacts=artifacts)])


async def again(store: Store, clock: ManualClock, held: Claim) -> Claim:
    """The next attempt of the task that this claim runs."""
    retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error(), retried=False)
    await settle(store, held, retry)
    (following,) = await claim(store)
    return following


def of(held: Claim, *lines: LogLine) -> list[AttemptLine]:
    return [AttemptLine(held.token, line) for line in lines]


def listed(held: Claim, *artifacts: Artifact) -> list[AttemptArtifact]:
    return [AttemptArtifact(held.token, msgspec.structs.replace(one, data=None)) for one in artifacts]


class AttemptContract(Desk):
    # --- the attempt --------------------------------------------------------------------------------------------------

    async def test_a_running_attempt_is_listed_last(self, store: Store, clock: ManualClock) -> None:
        """An attempt has its identity from its claim on: it is listed as running, behind those that have finished."""
        started = clock.now()
        (held,) = await start(store, a_record())
        running = Attempt(1, held.token, A, TaskState.RUNNING, started)
        assert await store.list_attempts(held.uuid) == [running]
        tick(clock, 1)
        following = await again(store, clock, held)
        first, second = await store.list_attempts(held.uuid)
        assert (first.token, first.state, first.finished_at) == (held.token, TaskState.RETRYING, clock.now())
        assert second == Attempt(2, following.token, A, TaskState.RUNNING, clock.now())

    async def test_a_running_attempt_counts_among_those_kept(self, store: Store, clock: ManualClock) -> None:
        """No more than the latest hundred attempts are listed, and one that runs is always among them."""
        (held,) = await start(store, a_record())
        for _ in range(ATTEMPTS_KEPT):
            held = await again(store, clock, held)
        attempts = await store.list_attempts(held.uuid)
        assert (len(attempts), attempts[-1].token) == (ATTEMPTS_KEPT, held.token)

    async def test_a_report_names_the_worker(self, store: Store, clock: ManualClock) -> None:
        """The worker process that a report names belongs to the running attempt, and stays with it when it fails."""
        (held,) = await start(store, a_record())
        await store.turn(A, reports=[Report(held, worker_pid=WORKER), Report(held, checkpoint="1")])
        assert [run.worker_pid for run in await store.list_attempts(held.uuid)] == [WORKER]
        assert (await get(store, held)).worker_pid == WORKER
        following = await again(store, clock, held)
        assert [run.worker_pid for run in await store.list_attempts(held.uuid)] == [WORKER, None]
        assert (await get(store, held)).worker_pid is following.record.worker_pid is None

    @pytest.mark.parametrize("is_completed", [True, False])
    async def test_a_reported_worker_stays_with_the_finished(
        self, store: Store, clock: ManualClock, is_completed: bool
    ) -> None:
        """An attempt that finishes without naming its worker keeps the reported one; the task itself has none."""
        (held,) = await start(store, a_record())
        await store.turn(A, reports=[Report(held, worker_pid=WORKER)])
        failed = Move.failed(at=clock.now(), error=an_error())
        await settle(store, held, Move.completed(at=clock.now()) if is_completed else failed)
        assert [run.worker_pid for run in await store.list_attempts(held.uuid)] == [WORKER]
        assert (await get(store, held)).worker_pid is None

    @pytest.mark.parametrize("state", [TaskState.COMPLETED, TaskState.FAILED])
    async def test_a_settle_names_worker_and_device(self, store: Store, clock: ManualClock, state: TaskState) -> None:
        """The worker process and the device of a settle go into the attempt; they win over what was reported."""
        held, plain = await start(store, a_record(), a_record())
        await store.turn(A, reports=[Report(held, worker_pid=WORKER)])
        error = an_error() if state is TaskState.FAILED else None
        move = Move(state=state, at=clock.now(), error=error, worker_pid=OTHER_WORKER, device="cuda:1")
        other = msgspec.structs.replace(move, worker_pid=None, device=None)
        await store.turn(A, settles=[(held, move), (plain, other)])
        (run,), (bare,) = [await store.list_attempts(one.uuid) for one in (held, plain)]
        assert (run.worker_pid, run.device, run.state) == (OTHER_WORKER, "cuda:1", state)
        assert (bare.worker_pid, bare.device, bare.state) == (None, None, state)

    async def test_a_canceled_attempt_keeps_its_worker(self, store: Store, clock: ManualClock) -> None:
        """A cancel that turns the settle into another one leaves worker and device as they were."""
        (held,) = await start(store, a_record())
        await store.apply([held.uuid], Cancel())
        retry = Move.retrying(at=clock.now(), due_at=clock.now(), error=an_error())
        await settle(store, held, msgspec.structs.replace(retry, worker_pid=WORKER, device="cuda:0"))
        (run,) = await store.list_attempts(held.uuid)
        assert (run.state, run.worker_pid, run.device) == (TaskState.CANCELED, WORKER, "cuda:0")

    async def test_a_rescued_attempt_keeps_its_worker_and_lines(self, store: Store) -> None:
        """What the attempt of a dead node has reported is still there."""
        (held,) = await start(store, a_record(), node=B)
        await store.turn(B, reports=[Report(held, worker_pid=WORKER, lines=(a_line(1),), artifacts=(a_file("a"),))])
        await store.rescue(B)
        (run,) = await store.list_attempts(held.uuid)
        assert (run.state, run.worker_pid) == (TaskState.INTERRUPTED, WORKER)
        assert await store.list_lines(held.uuid) == of(held, a_line(1))
        assert await store.list_artifacts(held.uuid) == listed(held, a_file("a"))
        assert (await get(store, held)).worker_pid is None

    # --- lines --------------------------------------------------------------------------------------------------------

    async def test_lines_are_kept(self, store: Store, clock: ManualClock) -> None:
        """Lines come back as they were written, oldest first, of a running attempt and of finished ones."""
        (held,) = await start(store, a_record())
        odd = LogLine(a_line(2).at, "warning", "naïve \U0001f600 'x' \\0 {}\n", "stderr")
        await say(store, held, a_line(1), odd)
        await say(store, held, dropped_line(1234, a_line(3).at), a_line(4))
        first = of(held, a_line(1), odd, dropped_line(1234, a_line(3).at), a_line(4))
        assert await store.list_lines(held.uuid) == first
        following = await again(store, clock, held)
        await say(store, following, a_line(5))
        await settle(store, following, Move.completed(at=clock.now()))
        assert await store.list_lines(held.uuid) == first + of(following, a_line(5))

    async def test_lines_of_one_attempt(self, store: Store, clock: ManualClock) -> None:
        """A token asks for the lines of one attempt; a limit for the latest ones."""
        (held,) = await start(store, a_record())
        await say(store, held, *map(a_line, range(4)))
        following = await again(store, clock, held)
        await say(store, following, a_line(9))
        assert await store.list_lines(held.uuid, token=held.token) == of(held, *map(a_line, range(4)))
        assert await store.list_lines(held.uuid, token=held.token, limit=2) == of(held, a_line(2), a_line(3))
        assert await store.list_lines(held.uuid, limit=2) == of(held, a_line(3)) + of(following, a_line(9))
        assert await store.list_lines(held.uuid, token=10**9) == []
        assert await store.list_lines("nobody") == []

    async def test_lines_that_come_again(self, store: Store) -> None:
        """A line that is there already is left as it is: after an answer that was lost, all come again."""
        (held,) = await start(store, a_record())
        await say(store, held, a_line(1), a_line(2))
        await say(store, held, a_line(1, "another text"), a_line(2), a_line(3))
        twice = Report(held, lines=(a_line(3), a_line(4)))
        await store.turn(A, reports=[twice, twice])
        assert await store.list_lines(held.uuid) == of(held, *map(a_line, range(1, 5)))

    async def test_the_latest_lines_are_kept(self, store: Store) -> None:
        """Of each attempt the latest thousand lines are kept, whichever come again."""
        held, other = await start(store, a_record(), a_record())
        lines = [a_line(number) for number in range(LINES_KEPT + 7)]
        await say(store, held, *lines[:LINES_KEPT])
        await store.turn(A, reports=[Report(held, lines=tuple(lines[LINES_KEPT:])), Report(other, lines=(lines[0],))])
        await say(store, held, *lines[:3])
        assert await store.list_lines(held.uuid, limit=2 * LINES_KEPT) == of(held, *lines[7:])
        assert await store.list_lines(other.uuid) == of(other, lines[0])

    async def test_a_stale_attempt_leaves_nothing(self, store: Store, clock: ManualClock) -> None:
        """Lines, artifacts and the worker of a run that has lost its task are not written."""
        (stale,) = await start(store, a_record())
        held = await again(store, clock, stale)
        last = Report(stale, lines=(a_line(1),), artifacts=(an_artifact("a"),), worker_pid=WORKER)
        await store.turn(A, reports=[last])
        assert await store.list_lines(held.uuid) == []
        assert await store.list_artifacts(held.uuid) == []
        assert [run.worker_pid for run in await store.list_attempts(held.uuid)] == [None, None]

    # --- artifacts ----------------------------------------------------------------------------------------------------

    async def test_artifacts_are_kept(self, store: Store, clock: ManualClock) -> None:
        """Artifacts are listed by attempt and name without their data, and found with it."""
        (held,) = await start(store, a_record())
        small, large = an_artifact("b.bin", bytes(range(256)) * (ARTIFACT_DATA_BYTES // 256)), a_file("a.mp4")
        await keep(store, held, small, large)
        following = await again(store, clock, held)
        await keep(store, following, empty := an_artifact("ä", b""))
        await settle(store, following, Move.completed(at=clock.now()))
        assert await store.list_artifacts(held.uuid) == listed(held, large, small) + listed(following, empty)
        assert await store.find_artifact(held.uuid, held.token, "b.bin") == small
        assert await store.find_artifact(held.uuid, held.token, "a.mp4") == large
        assert await store.find_artifact(held.uuid, following.token, "ä") == empty

    async def test_an_artifact_that_is_not_there(self, store: Store) -> None:
        """An unknown task, attempt or name has no artifact."""
        (held,) = await start(store, a_record())
        await keep(store, held, an_artifact("a"))
        assert await store.find_artifact(held.uuid, held.token, "b") is None
        assert await store.find_artifact(held.uuid, held.token + 1, "a") is None
        assert await store.find_artifact("nobody", held.token, "a") is None
        assert await store.list_artifacts("nobody") == []

    async def test_an_artifact_replaces_that_of_its_name(self, store: Store) -> None:
        """An artifact takes the place of one of the same attempt with its name, also when it comes twice."""
        (held,) = await start(store, a_record())
        await keep(store, held, an_artifact("a", b"old"), an_artifact("b"))
        await keep(store, held, a_file("a"))
        await keep(store, held, a_file("a"))
        assert await store.find_artifact(held.uuid, held.token, "a") == a_file("a")
        assert await store.list_artifacts(held.uuid) == listed(held, a_file("a"), an_artifact("b"))

    # --- forgetting ---------------------------------------------------------------------------------------------------

    async def test_outputs_go_with_their_task(self, store: Store, clock: ManualClock) -> None:
        """A pruned task leaves no lines and no artifacts, also to a later task with its uuid."""
        gone, stays = await start(store, a_record(), a_record())
        for held in (gone, stays):
            await say(store, held, a_line(1))
            await keep(store, held, an_artifact("a"))
        await settle(store, gone, Move.completed(at=clock.now()))
        assert await store.prune(finished_before=tick(clock, 1)) == 1
        await add(store, a_record(uuid=gone.uuid))
        assert await store.list_lines(gone.uuid) == []
        assert await store.list_artifacts(gone.uuid) == []
        assert await store.find_artifact(gone.uuid, gone.token, "a") is None
        assert await store.list_lines(stays.uuid) == of(stays, a_line(1))
        assert await store.list_artifacts(stays.uuid) == listed(stays, an_artifact("a"))

    async def test_outputs_stay_when_a_task_is_sent_again(self, store: Store, clock: ManualClock) -> None:
        """A failed task that is retried still has the lines and artifacts of its earlier attempts."""
        (held,) = await start(store, a_record())
        await say(store, held, a_line(1))
        await keep(store, held, an_artifact("a"))
        await settle(store, held, Move.failed(at=clock.now(), error=an_error()))
        await store.apply([held.uuid], Retry())
        assert await store.list_lines(held.uuid) == of(held, a_line(1))
        assert await store.list_artifacts(held.uuid) == listed(held, an_artifact("a"))

    async def test_outputs_go_with_their_attempt(self, store: Store, clock: ManualClock) -> None:
        """An old attempt that is no longer kept takes its lines and artifacts with it, and no others."""
        (first,) = await start(store, a_record())
        held = first
        for number in range(ATTEMPTS_KEPT + 1):
            if number < 3:
                await say(store, held, a_line(number))
                await keep(store, held, an_artifact("a"))
            held = await again(store, clock, held)
        kept = await store.list_lines(held.uuid)
        assert [one.line for one in kept] == [a_line(1), a_line(2)]
        assert [one.token for one in await store.list_artifacts(held.uuid)] == [one.token for one in kept]
