"""One run of one task, from claim to settle: prepare, execute, settle, commit.

The runner owns what runs on this node. It never decides what becomes of a task (`model.settle` does) and never writes
(the dispatcher does). It settles only what has ended: a thread that goes on after the node has stopped keeps its claim.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec

from taskyard.errors import NotJson, PayloadTooLarge, ResultsPruned, StoreError
from taskyard.execution.context import CURRENT
from taskyard.execution.idle import Idle
from taskyard.execution.line_capture import keep_capturing, start_capture, stop_capture
from taskyard.execution.run_execution import execute
from taskyard.execution.run_handle import DEFAULT_CANCEL_GRACE_S, LiveRuns, RunHandle, RunHost, pause
from taskyard.model.budget import RetryBudget
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.model.limits import tighter
from taskyard.model.move import Move
from taskyard.model.notes import Note, NoteCode
from taskyard.model.queue import AUTO_RECOVER, RETRIES_PER_S, QueueSettings
from taskyard.model.retry import RetryPolicy
from taskyard.model.settle import settle, settle_success
from taskyard.model.state import COMPLETED
from taskyard.model.task import Claim, TaskRecord, to_json
from taskyard.model.trace import task_trace_id
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutionRequest, ExecutorProtocol
from taskyard.ports.explain import RemoteTraceback, canceled, explain, internal_fault, refused, rejected
from taskyard.ports.middleware import Middleware
from taskyard.ports.sink import NO_SINKS, RunCompleted, RunStarted, Sinks, finished_kind
from taskyard.ports.store import Report

log = logging.getLogger("taskyard")

REJECTED_PAUSE_S = 0.1
"""How long a rejected run keeps its slot before it goes back to the queue: the next try must not follow at once."""

DEFAULT_RETRY = RetryPolicy()


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """`retry` is for tasks whose record, consumer and queue name no policy. `artifact_folder` is where large artifacts
    are written; None means a private folder among the data of this user. `middleware` goes around every run."""

    retry: RetryPolicy = DEFAULT_RETRY
    cancel_grace_s: float = DEFAULT_CANCEL_GRACE_S
    max_payload_bytes: int = 1 << 20
    artifact_folder: Path | None = None
    middleware: tuple[Middleware, ...] = ()


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where a run's end and its reports go: the dispatcher. `complete` makes a group's summary ready to run."""

    settle: Callable[[Claim, Move], None]
    report: Callable[[Report], None]
    complete: Callable[[TaskRecord], Awaitable[TaskRecord]]


class Runner:
    """`fails_unknown`: a task of a source that no consumer has is failed, and said so. Else it goes back, since that
    one was there when it was claimed."""

    def __init__(  # noqa: PLR0913 - what it works with, each part with a name
        self,
        *,
        consumers: Mapping[str, Consumer],
        executors: Mapping[str, ExecutorProtocol],
        queues: Mapping[str, QueueSettings],
        clock: Clock,
        hooks: Hooks,
        jitter: Callable[[], float],
        settings: RunnerSettings,
        fails_unknown: bool = False,
        sinks: Sinks = NO_SINKS,
    ) -> None:
        self._consumers, self._executors, self._queues = consumers, executors, queues
        self._fails_unknown, self._sinks = fails_unknown, sinks
        self._clock, self._hooks, self._jitter, self._settings = clock, hooks, jitter, settings
        self._middleware = _around_runs(settings.middleware)
        self._budgets: dict[str, RetryBudget | None] = {}
        self._host: RunHost | None = None
        self._live = LiveRuns()
        self._idle = Idle()

    def __len__(self) -> int:
        return len(self._live)

    def is_running(self, token: int) -> bool:
        return token in self._live

    def holds_of(self, node: str) -> bool:
        """Whether something runs here that was claimed under this incarnation."""
        return any(run.claim.record.node == node for run in self._live.values())

    def start(self, claim: Claim) -> None:
        """Begin the run in an asyncio task of its own. Never blocks and never raises."""
        host = self._host
        if host is None:
            host = self._host = self._make_host()
        keep_capturing()
        # Known from here on, not from the task's first step: a cancel may come in between.
        run = RunHandle(claim, host)
        self._live[claim.token] = run
        if claim.record.cancel is not None:
            run.request_cancel()  # a claim that was found again, after a turn that went unanswered
        if RunStarted in self._sinks.kinds:
            self._sinks.tell(RunStarted(claim, self._consumers.get(claim.record.consumer), self._clock.now()))
        run.belongs_to(host.loop.create_task(self._run(run)))

    def _make_host(self) -> RunHost:
        start_capture()
        return RunHost(
            asyncio.get_running_loop(),
            self._hooks.report,
            now=self._clock.now,
            artifact_folder=self._settings.artifact_folder,
            cancel_grace_s=self._settings.cancel_grace_s,
        )

    def close(self) -> None:
        """Nothing will run here any more: what is printed and logged is no longer captured for this node."""
        if self._host is not None:
            self._host = None
            stop_capture()

    # --- the pipeline -------------------------------------------------------------------------------------------------

    async def _run(self, run: RunHandle) -> None:
        move: Move | None
        try:
            record = run.claim.record
            if record.group_id is not None and record.group_id == record.uuid:
                await self._complete(run)
            executor, request = self._prepare(run)
            own = request.spec.middleware
            middleware = self._middleware + _around_runs(own) if own else self._middleware
            if middleware:
                result = await execute(run, executor, request, middleware)
            else:
                # As `execute` does, for less: this asyncio task is the run's own, and nothing else sees its context.
                CURRENT.set(run)
                result = await executor.submit(request)
            if result.error is not None and result.error.kind is ErrorKind.REJECTED:
                await pause(run, self._clock, REJECTED_PAUSE_S)
            move = self._settle(run, result)
        except asyncio.CancelledError:
            move = self._cut_short(run)
        except _Unfit as unfit:
            move = self._settle(run, ExecutionResult(success=False, error=unfit.error))
        except Exception as exc:
            run.keep_exception(exc)
            move = self._settle(run, ExecutionResult(success=False, error=internal_fault(exc)))
        self._commit(run, move)

    async def _complete(self, run: RunHandle) -> None:
        """Give a group's summary what the others returned."""
        try:
            record = await self._hooks.complete(run.claim.record)
        except StoreError as exc:
            await pause(run, self._clock, REJECTED_PAUSE_S)
            raise _Unfit(ExecutionError(kind=ErrorKind.REJECTED, message=str(exc))) from exc
        except (PayloadTooLarge, ResultsPruned) as exc:
            raise _Unfit(explain(exc)) from exc
        run.replace_record(record)

    def _prepare(self, run: RunHandle) -> tuple[ExecutorProtocol, ExecutionRequest]:
        """Where to run it and what to ask for, or `_Unfit`."""
        record = run.claim.record
        consumer = self._consumers.get(record.consumer)
        if consumer is None and not self._fails_unknown:
            # Race: it was unregistered between the claim and this first step.
            raise _Unfit(rejected(f"the consumer {record.consumer!r} was unregistered before it began"))
        if consumer is None:
            log.error("[drop] Unknown task source: %s %s", record.consumer, record.task.to_dict(), extra=_about(run))
            raise _Unfit(refused(f"no consumer is called {record.consumer!r} on the node that took this task"))
        if run.cancel_requested or run.stop_requested:
            # Race: the cancel, or the stop, came between the claim and this first step. The code never starts.
            raise _Unfit(canceled("canceled before it began") if run.cancel_requested else _stopped())
        run.set_consumer(consumer)
        executor = self._executors.get(consumer.executor)
        if executor is None:
            wants = f"consumer {consumer.name!r} wants executor {consumer.executor!r}"
            raise _Unfit(refused(f"{wants}, which this node does not have"))
        timeout_s = tighter(record.timeout_s, consumer.timeout_s)
        return executor, ExecutionRequest(
            spec=consumer,
            payload=record,
            request_id=record.uuid,
            trace_id=None if record.extra is None else task_trace_id(record),
            run=run,
            timeout_s=timeout_s,
        )

    def _settle(self, run: RunHandle, result: ExecutionResult) -> Move:
        now = self._clock.now()
        run.keep_result(result)
        if result.success:
            try:
                kept = self._keep(result.data)
            except (NotJson, PayloadTooLarge) as exc:
                run.keep_exception(exc)
                result = msgspec.structs.replace(result, success=False, data=None, error=explain(exc))
                run.keep_result(result)
            else:
                return settle_success(result, now=now, result_json=kept)
        elif run.stop_requested and not run.cancel_requested:
            # Whatever it raised when it was cut short: a graceful stop uses up no attempt.
            return Move.given_back(at=now, note=Note(run.stop_code))
        record = run.claim.record
        move = settle(
            record,
            result,
            retry=self._policy(run),
            auto_recover=self._auto_recover(record.queue),
            now=now,
            jitter=self._jitter(),
            cancel_asked=run.cancel_requested,
        )
        if result.worker_pid is not None:
            move = msgspec.structs.replace(move, worker_pid=result.worker_pid)
        return self._spread(record.queue, move) if move.retried and move.due_at is not None else move

    def _spread(self, queue: str, move: Move) -> Move:
        """Put a retry off for as long as the budget of its queue wants: what fails together is not tried together."""
        if queue not in self._budgets:
            settings = self._queues.get(queue)
            per_s = RETRIES_PER_S if settings is None else settings.retries_per_s
            self._budgets[queue] = None if per_s is None else RetryBudget(per_s)
        budget = self._budgets[queue]
        if budget is None or move.due_at is None:
            return move
        now_s = self._clock.monotonic()
        wanted_s = now_s + (move.due_at - move.at).total_seconds()
        later_s = budget.book(wanted_s, now_s=now_s) - wanted_s
        if later_s <= 0:
            return move
        return msgspec.structs.replace(move, due_at=move.due_at + timedelta(seconds=later_s))

    def _keep(self, data: object) -> str:
        text = to_json("the result", data)
        limit = self._settings.max_payload_bytes
        # A character takes at most 4 bytes: most results need no second look.
        if len(text) * 4 > limit and (size := len(text.encode())) > limit:
            raise PayloadTooLarge("the result", size, limit)
        return text

    def _policy(self, run: RunHandle) -> RetryPolicy:
        record, consumer = run.claim.record, run.consumer
        if record.retry is not None:
            return record.retry
        if consumer is not None and consumer.retry is not None:
            return consumer.retry
        queue = self._queues.get(record.queue)
        return queue.retry if queue is not None else self._settings.retry

    def _auto_recover(self, queue: str) -> int:
        settings = self._queues.get(queue)
        return AUTO_RECOVER if settings is None else settings.auto_recover

    def _cut_short(self, run: RunHandle) -> Move | None:
        """The asyncio task was cancelled: by our stop, or by whoever ends the event loop."""
        if run.asyncio_task is not None:
            run.asyncio_task.uncancel()
        if run.is_detached:
            return None
        return Move.given_back(at=self._clock.now(), note=Note(run.stop_code))

    def _commit(self, run: RunHandle, move: Move | None) -> None:
        raised = run.exception
        run.end()
        if move is not None:
            self._live.pop(run.claim.token, None)
            self._hooks.settle(run.claim, move)
            if move.state is not COMPLETED or RunCompleted in self._sinks.kinds:
                self._tell_finished(run, move, raised)
        if not self._live:
            self._idle.tell()

    def _tell_finished(self, run: RunHandle, move: Move, raised: BaseException | None) -> None:
        kind, error = finished_kind(move), move.error
        if kind not in self._sinks.kinds:
            return
        if raised is None and error is not None and error.traceback:
            # What was raised in a worker process stayed there; its traceback has come back as text.
            raised = RemoteTraceback(error.traceback)
        attempts = run.claim.attempt + max(0, self._policy(run).max_retries - run.claim.record.retries)
        self._sinks.tell(kind(run.claim, run.consumer, move, run.result, raised, attempts))

    # --- ending runs early --------------------------------------------------------------------------------------------

    def cancel(self, uuid: str, *, force: bool = False) -> bool:
        """Ask the run of this task to end, or kill it; whether there is one here. Of two, the later counts: the other
        is stale."""
        run = self._live.find(uuid)
        if run is None or run.has_ended:
            return False
        if force:
            run.kill()
        if not run.cancel_requested or (force and not run.has_grace_timer):
            run.request_cancel()
            loop = asyncio.get_running_loop()
            run.set_grace_timer(loop.call_later(self._settings.cancel_grace_s, self._still_running, run))
        return True

    def _still_running(self, run: RunHandle) -> None:
        grace_s = self._settings.cancel_grace_s
        text = "task %s from %s did not stop within %g s of the cancel request"
        log.warning(text, run.uuid, run.claim.record.consumer, grace_s, extra=_about(run))
        run.set_note(Note(NoteCode.CANCEL_OVERDUE, at=self._clock.now(), facts={"grace_s": grace_s}))

    async def drain(self, until_mono: float | None) -> bool:
        """Wait until nothing runs here, or `until_mono`; whether nothing does."""
        while self._live:
            if until_mono is not None and self._clock.monotonic() >= until_mono:
                return False
            with self._idle.watch() as ended:
                await self._clock.wait(ended, until_mono)
        return True

    def give_back_waiting(self) -> None:
        """What an executor has accepted and not begun goes back, because the node stops."""
        for run in self._live.list_all():
            if run.is_queued:
                run.request_stop()

    def interrupt(self, why: NoteCode | None = None) -> None:
        """Ask everything that runs here to end, because the node stops, or for another reason."""
        self._live.request_stop(why)

    async def abandon(self) -> list[str]:
        """Let go of what did not end. Nothing is settled: the code may still be running, so the claims stay."""
        left = self._live.list_all()
        for run in left:
            run.detach()
            if run.asyncio_task is not None:
                run.asyncio_task.cancel()
            run.end()
        await asyncio.sleep(0)
        return [run.uuid for run in left]


def _around_runs(middleware: tuple[Middleware, ...]) -> tuple[Middleware, ...]:
    """Those that go around a run or its code."""
    return tuple(one for one in middleware if one.around_run or one.around_code)


class _Unfit(Exception):
    """The run ends before any code of its consumer began."""

    def __init__(self, error: ExecutionError) -> None:
        self.error = error
        super().__init__(error.message)


def _stopped() -> ExecutionError:
    return ExecutionError(kind=ErrorKind.REJECTED, message="its node was stopped before it began")


def _about(run: RunHandle) -> dict[str, object]:
    """What a log line is about: a handler that hides secrets needs to know those of the task."""
    return {"task_record": run.claim.record}
