"""Worker processes: what a call costs, what large values cost, how long a hung one holds up the next, and whether the
loop stays free."""

from benchmarks.bars import PROCESS_PEERS
from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

MEGABYTE = 1_000_000
ARRAY = 64 * MEGABYTE
MEASURE = "benchmarks.processes.measure"


def _sides(function: str, names: list[str], work: dict[str, object]) -> list[Side]:
    return [Side(name, f"{MEASURE}:{function}", {"side": name, **work}) for name in names]


def calls(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=5_000, quick=1_000)}
    ours, anyio = _sides("one_at_a_time", ["taskyard", "anyio.to_process"], work)
    raw = Side("raw socketpair + pickle", f"{MEASURE}:raw_echo", work)
    title = "processes: no-op call, one at a time, p50"
    return Contest("call", title, Unit.SECONDS, ours, [anyio, raw]).hold(settings)


def parallel(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=20_000, quick=4_000)}
    ours, *others = _sides("in_parallel", ["taskyard", "run_in_executor", "pebble"], work)
    one_each = Contest("parallel", "processes: no-op calls, 2 workers, one in flight each", Unit.RATE, ours, others)
    piped: dict[str, object] = {**work, "clients": 64}
    ours, other = _sides("in_parallel", ["taskyard, pipelined", "multiprocessing.Pool"], piped)
    pipelined = Contest("pipelined", "processes: the same, pipelined", Unit.RATE, ours, [other])
    return one_each.hold(settings) + pipelined.hold(settings)


def large(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=200, quick=50), "size": MEGABYTE}
    ours, *others = _sides("bytes_there_and_back", ["taskyard", *PROCESS_PEERS], work)
    one = Contest("megabyte", "processes: 1 MB of bytes there and back", Unit.RATE, ours, others)
    work = {"count": settings.pick(full=20, quick=5), "size": ARRAY}
    ours, *others = _sides("array_in", ["taskyard", *PROCESS_PEERS], work)
    two = Contest("array", "processes: 64 MB NumPy array in, a number out", Unit.RATE, ours, others)
    return one.hold(settings) + two.hold(settings)


def hung(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=10, quick=3), "timeout_s": 0.5}
    ours, *others = _sides("hung", ["taskyard", "pebble", "anyio.to_process"], work)
    title = "processes: hung call, deadline → next call done"
    return Contest("hung", title, Unit.SECONDS, ours, others).hold(settings)


def lag(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"busy_s": float(settings.pick(full=5, quick=2))}
    ours, threads = _sides("lag", ["taskyard", "threads"], work)
    idle = Side("idle loop", f"{MEASURE}:idle_lag", work)
    title = "processes: loop lag p99, cores − 1 busy"
    return Contest("lag", title, Unit.SECONDS, ours, [threads, idle]).hold(settings)


def crashes(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=10_000, quick=1_000), "every": 20}
    ours = Side("taskyard", f"{MEASURE}:crashing", work)
    restarts = Side("as many restarts", f"{MEASURE}:restarting", work)
    title = "processes: every 20th call crashes its worker"
    return Contest("crashes", title, Unit.RATE, ours, [restarts]).hold(settings)
