"""The executors of a yard. Imported when one is opened, not with the package: worker processes bring a lot along."""

from __future__ import annotations

from collections.abc import Mapping

from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.isolated import IsolatedProcessPoolExecutor, settings_of
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.execution import INLINE, ISOLATED, PROCESS, THREAD
from taskyard.ports.executor import ExecutorProtocol


def make_executors(
    *, threads: int, pools: Mapping[str | None, PoolSettings], warm: bool
) -> dict[str, ExecutorProtocol]:
    """By the names that consumers use. `pools` has the rules of isolated pools by consumer, and those of the shared one
    under None; `warm`: the shared one has a worker ready."""
    return {
        INLINE: InProcessExecutor(),
        THREAD: ThreadExecutor(max_workers=threads),
        PROCESS: ProcessPoolExecutor(settings=pools.get(None), warm=warm),
        ISOLATED: IsolatedProcessPoolExecutor(lambda spec: pools.get(spec.name) or settings_of(spec)),
    }
