"""Where the engine says what it has just done, so that tests wait for that instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable

Probe = Callable[[object], None]


def _silent(_: object) -> None: ...


class Probes:
    """Silent outside tests; `taskyard.testing.probes` has the ones that can be awaited. Each is called at most once a
    turn, never once a task: `claimed`, `settled`, `reported` and `rescued` with the tasks' ids, `idle` when the
    dispatcher has nothing left to do, `outage` with the error of a turn that failed, `stumbled` with the name of a loop
    that had to be started again, `fenced` and `rejoined` with the incarnation that was lost and the one that follows
    it. `fired` with the tasks that schedules have made, `looked` with the time at which the next is due;
    `freed` with the key of a blocker that was freed."""

    claimed: Probe = staticmethod(_silent)
    settled: Probe = staticmethod(_silent)
    reported: Probe = staticmethod(_silent)
    rescued: Probe = staticmethod(_silent)
    idle: Probe = staticmethod(_silent)
    outage: Probe = staticmethod(_silent)
    stumbled: Probe = staticmethod(_silent)
    fenced: Probe = staticmethod(_silent)
    rejoined: Probe = staticmethod(_silent)
    fired: Probe = staticmethod(_silent)
    looked: Probe = staticmethod(_silent)
    freed: Probe = staticmethod(_silent)


SILENT = Probes()
