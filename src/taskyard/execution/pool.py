"""A pool of worker processes: who waits, who runs, who is replaced.

At most `max_workers` calls run at once, and one whose worker is being killed counts until the last of that worker's
descendants is gone. One more process than that may exist: the spare, ready before it is needed. Nothing here polls:
every step follows from a frame, a timer or the news that a worker is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

import msgspec

from taskyard.execution.calls import PendingCall
from taskyard.execution.hosted import HostedWorker
from taskyard.execution.idle import Idle
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.scene import Setting, WorkerSettings, present_scene, refuse_while_loading
from taskyard.execution.starting import Starter, ended
from taskyard.execution.wire import Bulk, Kind, Outgoing, encode
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.model.limits import tighter
from taskyard.ports.executor import ExecutorHealth, ExecutorStats
from taskyard.ports.explain import canceled, fault, refused, rejected, waited_long

MOST_RETURNS = 3
"""How often a call is sent again when its worker died before it had all of it: it may be what workers die of."""

START_AGAIN_S = 0.1
"""When a worker could not be started and calls wait: how long until the next try."""


class PoolNumbers(msgspec.Struct, frozen=True):
    """A pool at one moment. `crashed` counts workers that ended unasked, `killed` those ended for a timeout or a
    cancel, `recycled` those replaced by count or size."""

    workers: int
    active: int
    queued: int
    done: int
    crashed: int
    killed: int
    recycled: int


class WorkerPool:
    """Belongs to the event loop it is first used on; after a shutdown it may move to another."""

    def __init__(self, settings: PoolSettings, *, starter: Starter, shares: bool = True) -> None:
        self.settings = settings
        self._starter, self._shares = starter, shares
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: set[HostedWorker] = set()
        self._idle: list[HostedWorker] = []
        self._occupied: set[HostedWorker] = set()
        self._starting = 0
        self._waiting: deque[PendingCall] = deque()
        self._numbers = itertools.count(1)
        self._done = self._crashed = self._killed = self._recycled = 0
        self._is_closed = False
        self._starts = self._failed_starts = self._failed_up_to = 0
        self._retry: asyncio.TimerHandle | None = None
        self._news = Idle()

    @property
    def numbers(self) -> PoolNumbers:
        return PoolNumbers(
            workers=len(self._workers),
            active=len(self._occupied),
            queued=len(self._waiting),
            done=self._done,
            crashed=self._crashed,
            killed=self._killed,
            recycled=self._recycled,
        )

    def stats(self) -> ExecutorStats:
        return ExecutorStats(self.settings.max_workers, len(self._occupied), len(self._waiting), self._done)

    def health(self) -> ExecutorHealth:
        """Not healthy if it is closed, or if its last starts of workers have all failed and none is left."""
        if self._is_closed:
            return ExecutorHealth(is_healthy=False, problem="it is shut down")
        if self._failed_starts and not self._workers:
            count = self._failed_starts
            failed = "start of a worker has" if count == 1 else f"{count} starts of workers have"
            return ExecutorHealth(is_healthy=False, problem=f"the last {failed} failed")
        return ExecutorHealth()

    # --- the front door -----------------------------------------------------------------------------------------------

    async def start(self, *, warm: bool = True) -> None:
        """Open it; `warm`: have a worker ready soon."""
        refuse_while_loading()
        self._is_closed = False
        self._bind(asyncio.get_running_loop())
        if warm:
            self._grow()

    def submit(self, call: PendingCall) -> asyncio.Future[ExecutionResult]:
        """Run the call as soon as there is a worker. The future always gets a result; cancelling it ends nothing."""
        refuse_while_loading()
        self._bind(call.future.get_loop())
        if self._is_closed:
            call.fail(rejected("the process pool is shut down"))
            return call.future
        call.number = next(self._numbers)
        if call.run is not None:
            call.run.mark_queued()
        if not self._waiting and (worker := self._free_worker(call)) is not None:
            self._give(worker, call)
        else:
            self._queue(call)
        return call.future

    def interrupt(self, call: PendingCall) -> None:
        """Have the call end: one that waits is given up, one that runs is asked, then terminated, then killed."""
        worker = call.worker
        if call.is_over or call.is_asked:
            return
        call.is_asked = True
        if worker is None:
            self._forget(call)
            call.give_up()
        elif worker.calls and call is worker.calls[0]:
            self._ask(worker, call)

    def end_now(self, call: PendingCall, why: str = "its caller has gone") -> None:
        """Have the call end without grace."""
        worker = call.worker
        if worker is None:
            if not call.is_over:
                self._forget(call)
                call.give_up()
        elif not worker.calls:
            return  # it was answered, and its worker is being killed for it
        elif call is worker.calls[0]:
            call.verdict = canceled(f"killed, because {why}")
            worker.kill()
        else:
            call.verdict = canceled(f"given up, because {why}")

    async def shutdown(self, *, wait: bool = True) -> None:
        """Take nothing new; what waits is rejected, what runs goes on. With `wait`, until every worker is gone."""
        self._is_closed = True
        self._forget_retry()
        while self._waiting:
            self._waiting.popleft().fail(rejected("the process pool was shut down before it began"))
        for worker in [worker for worker in self._workers if worker not in self._occupied]:
            self._retire(worker)
        if wait:
            await self._news.wait_while(lambda: self._workers)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            return
        if self._workers:
            raise RuntimeError("this process pool is in use on another event loop; shut it down there first")
        self._loop = loop

    # --- who runs next ------------------------------------------------------------------------------------------------

    def _queue(self, call: PendingCall) -> None:
        room = self.settings.max_workers - len(self._occupied)
        if len(self._waiting) >= self.settings.queue_limit + room:
            call.fail(rejected(f"all {self.settings.max_workers} worker processes are busy and the queue is full"))
            return
        self._waiting.append(call)
        self._limit_wait(call)
        self._grow()

    def _limit_wait(self, call: PendingCall) -> None:
        wait_s = tighter(call.wait_s, self.settings.wait_s)
        if wait_s is None:
            return
        loop = call.future.get_loop()
        if call.wait_until_mono is None:
            call.wait_until_mono = loop.time() + wait_s
        call.waiting = loop.call_at(call.wait_until_mono, self._waited_long, call, wait_s)

    def _waited_long(self, call: PendingCall, wait_s: float) -> None:
        self._forget(call)
        call.fail(waited_long(wait_s))

    def _forget(self, call: PendingCall) -> None:
        if call in self._waiting:
            self._waiting.remove(call)

    def _free_worker(self, call: PendingCall) -> HostedWorker | None:
        """One that can take the call now; one that runs another only if this one may wait there as long as it takes:
        what was sent ahead cannot be called back."""
        if len(self._occupied) < self.settings.max_workers:
            while self._idle:
                worker = self._idle.pop()
                if not worker.is_dying:
                    return worker
            return None
        if self.settings.pipeline == 1 or tighter(call.wait_s, self.settings.wait_s) is not None:
            return None
        fitting = [worker for worker in self._occupied if self._may_pipeline(worker)]
        return min(fitting, key=lambda worker: len(worker.calls), default=None)

    def _may_pipeline(self, worker: HostedWorker) -> bool:
        return len(worker.calls) < self.settings.pipeline and not worker.is_dying and not self._is_used_up(worker)

    def _give(self, worker: HostedWorker, call: PendingCall) -> None:
        if call.waiting is not None:
            call.waiting.cancel()
        self._occupied.add(worker)
        try:
            worker.give(call, is_alone=len(self._occupied) == 1)
        except BaseException as exc:  # what pickles is anybody's code
            message = f"it cannot be sent to a worker process: {type(exc).__name__}: {exc}"
            # Without memory or descriptors the next try may do better; what does not pickle never will.
            is_ours = isinstance(exc, OSError | MemoryError)
            call.fail(fault(message) if is_ours else refused(message))
            if not worker.calls:
                self._release(worker)
            return
        if self.settings.spare and not self._idle:
            self._grow()

    def _dispatch(self) -> None:
        while self._waiting and (worker := self._free_worker(self._waiting[0])) is not None:
            self._give(worker, self._waiting.popleft())
        self._grow()

    def _grow(self) -> None:
        """Start the workers that waiting calls need, and the spare. After a start that failed, those that live serve
        what waits until the next try."""
        alive = self._count_alive()
        if self._is_closed or self._loop is None or (alive and self._retry is not None):
            return
        wanted = min(len(self._waiting), self.settings.max_workers - len(self._occupied))
        if self.settings.spare and not self._idle and not self._failed_starts:
            wanted += 1
        wanted = min(wanted - self._starting, self.settings.max_workers + self.settings.spare - alive)
        for _ in range(wanted):
            if not self._start_worker(self._loop):
                return

    def _count_alive(self) -> int:
        """Workers that serve calls, or will when they have started."""
        return sum(not worker.is_dying and not worker.is_retiring for worker in self._workers)

    def _start_worker(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether one is on its way. Never raises: who asks has a call in the queue, or is a callback of the loop's."""
        settings = self.settings
        try:
            setup = self._encode_setup()
            process = self._starter.spawn(() if settings.environ else settings.preload)
            worker = HostedWorker(process, loop, self, shares=self._shares, load_s=settings.load_s)
        except Exception as exc:
            self._blame_start(fault(f"a worker process could not be started: {exc}"), tries=1)
            if self._waiting:
                self._start_later(loop)  # nothing else may: perhaps no worker is on its way
            return False
        self._workers.add(worker)
        self._starting += 1
        self._starts += 1
        worker.place = self._starts
        worker.set_up(setup)
        return True

    def _encode_setup(self) -> Outgoing:
        settings = self.settings
        worker = WorkerSettings(
            memory_limit=settings.memory_limit,
            recycle_rss=settings.recycle_rss,
            shares=self._shares,
            preload=settings.preload,
            environ=settings.environ,
        )
        setting: Setting = (worker, present_scene(), Bulk.of(settings.setup))
        # Not through a memfd: the loop sends megabytes piece by piece, but would write them into memory at once.
        return encode(Kind.SETUP, value=setting, shares=False)

    def _blame_start(self, error: ExecutionError, *, tries: int, place: int | None = None) -> None:
        """After so many starts in a row that failed each answers one call, if nobody else will serve it: so a pool that
        cannot start never turns in circles, and a worker, or a nursery, that was killed while it started harms nobody.
        Those that were on their way when one failed (by their `place` among all starts) most likely failed with it, and
        count as one."""
        if self._failed_starts < tries and place is not None and place <= self._failed_up_to:
            return
        self._failed_starts += 1
        self._failed_up_to = self._starts
        if self._failed_starts >= tries and self._waiting and not self._count_alive():
            self._waiting.popleft().fail(_counted(error, self._failed_starts))

    def _start_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._retry is None:
            self._retry = loop.call_later(START_AGAIN_S, self._start_again)

    def _start_again(self) -> None:
        self._retry = None
        self._grow()

    def _forget_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    # --- what workers tell --------------------------------------------------------------------------------------------

    def ready(self, worker: HostedWorker) -> None:
        self._starting -= 1
        self._failed_starts = 0
        if self._is_closed or worker.is_retiring:
            self._retire(worker)
            return
        self._idle.insert(0, worker)  # who has worked before goes first: it has imported what calls need
        self._dispatch()

    def answered(self, worker: HostedWorker, call: PendingCall, result: ExecutionResult) -> None:
        self._done += 1
        if call.verdict is not None and not result.success:
            call.fail(call.verdict, worker_pid=worker.pid)
        else:
            call.answer(result)
        if worker.is_dying:
            return
        if not worker.calls:
            self._release(worker)
        elif call.verdict is not None or worker.calls[0].verdict is not None:
            worker.kill()  # the SIGTERM meant for this call could reach the next; or nobody wants the next any more
        elif worker.calls[0].is_asked:
            self._ask(worker, worker.calls[0])
        if self._waiting:
            self._dispatch()

    def _release(self, worker: HostedWorker) -> None:
        """Its last call is answered."""
        self._occupied.discard(worker)
        if self._is_closed:
            self._retire(worker)
        elif self._is_used_up(worker):
            self._recycled += 1
            self._retire(worker)
            self._grow()
        else:
            self._idle.append(worker)

    def _is_used_up(self, worker: HostedWorker) -> bool:
        limit = self.settings.recycle_after
        return worker.is_spent or (limit is not None and worker.served >= limit)

    def _retire(self, worker: HostedWorker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        if not worker.is_dying and not worker.is_retiring:
            worker.retire(self.settings.term_grace_s)

    def gone(self, worker: HostedWorker, status: int) -> None:
        """Nothing of it is left: its slot is free, and what it had not begun goes to others."""
        self._workers.discard(worker)
        self._occupied.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if not worker.is_ready:
            self._starting -= 1
        self._count_end(worker)
        if worker.calls or worker.late:
            self._bury(worker, status)
        elif not worker.is_ready and not self._is_closed:
            error = worker.complaint or fault(f"a worker process {ended(status)} before it was ready")
            # A nursery that is killed can take two starts with it: what it got before, and what it got while it died.
            self._blame_start(error, tries=2 if worker.complaint else 3, place=worker.place)
            if self._loop is not None and self._count_alive():
                self._start_later(self._loop)
        self._news.tell()
        self._dispatch()

    def _count_end(self, worker: HostedWorker) -> None:
        if worker.late or (worker.calls and worker.calls[0].verdict is not None):
            self._killed += 1
        elif not worker.is_retiring:
            self._crashed += 1

    def _bury(self, worker: HostedWorker, status: int) -> None:
        """Answer the call it died with. One behind a call that was answered late may have begun: it cannot be sent
        again. All others were not touched, and are; so is one that it had not received."""
        crash = worker.complaint or fault(f"its worker process {ended(status)}")
        begun = list(worker.late)
        if worker.calls and not self._may_return(worker.calls[0]):
            begun.append(worker.calls.popleft())
        for call in begun:
            self._done += 1
            call.fail(call.verdict or crash, worker_pid=worker.pid)
        while worker.calls:
            self._take_back(worker.calls.pop())

    def _may_return(self, call: PendingCall) -> bool:
        call.returns += call.is_undelivered
        return call.is_undelivered and call.verdict is None and call.returns <= MOST_RETURNS

    def _take_back(self, call: PendingCall) -> None:
        call.worker, call.is_undelivered = None, False
        if call.is_asked or call.verdict is not None:
            call.give_up()
        elif self._is_closed:
            call.fail(rejected("the process pool was shut down before it began"))
        else:
            self._waiting.appendleft(call)
            self._limit_wait(call)

    # --- ending a call early ------------------------------------------------------------------------------------------

    def _ask(self, worker: HostedWorker, call: PendingCall) -> None:
        worker.ask(call)
        run = call.run
        # A stop comes when the grace for it is over already.
        is_stop = run is not None and run.stop_requested and not run.cancel_requested
        grace_s = 0.0 if is_stop else self.settings.cancel_grace_s
        call.ending = call.future.get_loop().call_later(grace_s, self._terminate, worker, call)

    def _terminate(self, worker: HostedWorker, call: PendingCall) -> None:
        if len(worker.calls) > 1:
            # Where a worker ends by itself, those behind this call may have begun; killed, it has them sent again.
            self._kill(worker, call)
            return
        # From here on the code may end because of our signal, whatever it answers.
        call.verdict = canceled("it did not end when asked, and was terminated")
        worker.terminate()
        call.ending = call.future.get_loop().call_later(self.settings.term_grace_s, self._kill, worker, call)

    def _kill(self, worker: HostedWorker, call: PendingCall) -> None:
        call.verdict = canceled("it did not end when asked or terminated, and was killed")
        worker.kill()


def _counted(error: ExecutionError, starts: int) -> ExecutionError:
    """Who waits has waited for all of them: a `load_s` passes once for each."""
    if starts == 1:
        return error
    return msgspec.structs.replace(error, message=f"{error.message} ({starts} starts in a row have failed)")
