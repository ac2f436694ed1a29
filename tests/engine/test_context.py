"""What code inside a run sees and says: `current_run()`, progress, notes."""

import threading
from decimal import Decimal

import pytest

from taskyard.errors import NoCurrentRun
from taskyard.execution import run_handle
from taskyard.execution.context import RunContext, current_run
from taskyard.model.execution import Progress
from taskyard.model.notes import Note
from tests.engine.support import Work, quiet


def test_there_is_no_run_outside():
    """`current_run()` outside a task says that there is none."""
    with pytest.raises(NoCurrentRun):
        current_run()


@pytest.mark.parametrize("executor", ["inline", "thread"])
async def test_a_run_knows_itself(rig, executor):
    """Inline and in a thread, `current_run()` is the run of this task, attempt and token."""
    seen: list[tuple[str, str, int, int, bool]] = []

    def look(record) -> None:
        run = current_run()
        seen.append((run.uuid, run.source, run.attempt, run.token, run.cancelled))

    async def look_inline(record) -> None:
        look(record)

    rig.consumer("look", look_inline if executor == "inline" else look)
    uuid = await rig.submit("look")
    await rig.outcome(uuid)
    [run] = await rig.store.list_attempts(uuid)
    assert seen == [(uuid, "look", 1, run.token, False)]
    with pytest.raises(NoCurrentRun):
        current_run()


async def test_progress_is_thinned_out_but_its_last_word_is_kept(rig, monkeypatch):
    """Of many reports the first is stored at once and the last soon after; those in between cost nothing."""
    monkeypatch.setattr(run_handle, "PROGRESS_INTERVAL_S", 0.01)
    work = Work()

    async def report(record) -> str:
        for step in range(1, 1001):
            current_run().progress(step / 1000, f"step {step}")
        return await work(record)

    rig.consumer("report", report)
    await quiet()
    turns = rig.store.turns
    uuid = await rig.submit("report")
    await rig.probes.reported.next()
    assert (await rig.found(uuid)).progress == Progress(0.001, "step 1")
    await rig.probes.reported.next()
    assert (await rig.found(uuid)).progress == Progress(1.0, "step 1000")
    assert rig.store.turns == turns + 3
    work.let_go(uuid)
    await rig.outcome(uuid)


@pytest.mark.parametrize("executor", ["inline", "thread"])
async def test_the_last_word_of_a_run_that_ends_at_once_is_kept(rig, executor):
    """What a run says just before it ends stands on its record, in the order said, and its end is told."""

    def report(record) -> None:
        for step in range(1, 4):
            current_run().progress(step / 3, f"step {step}")
        current_run().note("all done")

    async def report_inline(record) -> None:
        report(record)

    rig.consumer("report", report_inline if executor == "inline" else report)
    uuid = await rig.submit("report")
    assert (await rig.outcome(uuid)).state == "completed"
    record = await rig.found(uuid)
    assert (record.progress, record.note) == (Progress(1.0, "step 3"), Note.remark("all done"))


async def test_a_run_that_says_nothing_ends_in_one_turn(rig):
    """A last word costs a turn only where there is one: the others are settled in the turn after their end."""
    work = Work()

    async def report(record) -> str:
        result = await work(record)
        current_run().progress(1.0)
        return result

    rig.consumer("work", work)
    rig.consumer("report", report)
    silent, talking = await rig.submit("work"), await rig.submit("report")
    await quiet()
    turns = rig.store.turns
    work.let_go(silent)
    work.let_go(talking)
    await rig.probes.reported.next()
    assert (await rig.state(silent), rig.store.turns) == ("completed", turns + 1)
    assert (await rig.outcome(talking)).state == "completed"


async def test_progress_from_a_thread(rig):
    """A thread reports progress while it runs."""
    go_on = threading.Event()

    def report(record) -> None:
        current_run().progress(0.5, "half way", rate=2.5)
        go_on.wait(10)

    rig.consumer("report", report)
    uuid = await rig.submit("report")
    await rig.probes.reported.next()
    assert (await rig.found(uuid)).progress == Progress(0.5, "half way", 2.5)
    go_on.set()
    await rig.outcome(uuid)


@pytest.mark.parametrize(
    ("said", "kept"), [(-1, 0.0), (7, 1.0), (float("nan"), 0.0), (None, None), (0.25, 0.25)], ids=repr
)
async def test_fractions_stay_between_zero_and_one(rig, said, kept):
    """A fraction outside 0 … 1 is brought inside: progress never fails a run."""
    work = Work()

    async def report(record) -> str:
        current_run().progress(said, "x")
        return await work(record)

    rig.consumer("report", report)
    uuid = await rig.submit("report")
    await quiet()
    assert (await rig.found(uuid)).progress == Progress(kept, "x")
    work.let_go(uuid)


class Unreadable:
    def __str__(self) -> str:
        raise ValueError

    __float__ = __str__


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (("half", None, "fast"), Progress(None, "None", None)),
        ((Decimal("0.5"), 7, Decimal(2)), Progress(0.5, "7", 2.0)),
        ((0.5, "caf\udce9", float("inf")), Progress(0.5, "caf\\udce9", None)),
        ((10**400, "x" * 9000, float("nan")), Progress(None, "x" * 500, None)),
        ((Unreadable(), Unreadable(), Unreadable()), None),
    ],
    ids=["wrong types", "other numbers", "lone surrogate", "too much", "unreadable"],
)
async def test_odd_progress_never_fails_a_run(rig, said, kept):
    """Whatever is said as progress, the run goes on, and what is stored is a number, a short text or nothing."""
    work = Work()

    async def report(record) -> str:
        current_run().progress(*said)
        return await work(record)

    rig.consumer("report", report)
    uuid = await rig.submit("report")
    await quiet()
    progress = (await rig.found(uuid)).progress
    assert progress == kept or (kept is None and "could not be read" in progress.message)
    work.let_go(uuid)
    assert (await rig.outcome(uuid)).state == "completed"


@pytest.mark.parametrize("said", [(7.5,), ("x",), (float("nan"),), (0.5, "", "fast")], ids=repr)
async def test_odd_progress_is_told_once(rig, said, caplog):
    """Whoever says a fraction or a rate that is none hears of it in the log, once in a run and no more."""

    async def report(record) -> None:
        for _ in range(3):
            current_run().progress(0.5, "fine", 2)
            current_run().progress(*said)

    rig.consumer("report", report)
    assert (await rig.outcome(await rig.submit("report"))).state == "completed"
    [record] = [record for record in caplog.records if record.name == "taskyard.run"]
    assert "is not kept as it is" in record.getMessage()


async def test_a_note_is_text_a_store_can_take(rig):
    """A note loses its lone surrogates and all but its first 500 characters."""
    work = Work()

    async def remark(record) -> str:
        current_run().note("caf\udce9" + "x" * 9000)
        return await work(record)

    rig.consumer("remark", remark)
    uuid = await rig.submit("remark")
    await quiet()
    assert (await rig.found(uuid)).note == Note.remark(("caf\\udce9" + "x" * 9000)[:500])
    work.let_go(uuid)


async def test_a_note_is_put_on_the_record(rig):
    """A note stands on the record while the task runs."""
    work = Work()

    async def remark(record) -> str:
        current_run().note("look at this")
        return await work(record)

    rig.consumer("remark", remark)
    uuid = await rig.submit("remark")
    await quiet()
    assert (await rig.found(uuid)).note == Note.remark("look at this")
    work.let_go(uuid)


async def test_an_ended_run_says_nothing_more(rig):
    """What is reported after the run has ended is dropped."""
    runs: list[RunContext] = []

    async def leave(record) -> None:
        runs.append(current_run())

    rig.consumer("leave", leave)
    uuid = await rig.submit("leave")
    await rig.outcome(uuid)
    turns = rig.store.turns
    runs[0].progress(0.5)
    runs[0].note("too late")
    await quiet()
    assert rig.store.turns == turns
    assert (await rig.found(uuid)).note is None


async def test_a_run_shows_what_is_its_own(rig):
    """`dir(current_run())` has what code may use and nothing else; `task` is the record of the task, and a copy."""
    seen: list[object] = []

    async def look(record) -> None:
        run = current_run()
        run.task.queue = "another"
        seen.extend((dir(run), run.task == record, run.task is record, run.consumer, run.source))

    rig.consumer("look", look)
    uuid = await rig.submit("look")
    await rig.outcome(uuid)
    names, is_equal, is_same, *consumers = seen
    assert names == [
        "artifact", "attempt", "cancelled", "checkpoint", "checkpointed", "consumer", "device", "log", "note",
        "progress", "source", "task", "token", "trace", "uuid", "values",
    ]  # fmt: skip
    assert (is_equal, is_same, consumers) == (True, False, ["look", "look"])
