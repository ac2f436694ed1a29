"""Device pools: what a device that hangs costs the others, how soon one is back, how soon a task starts, and what a
farm costs that is idle. The devices are simulated ones, which cost next to nothing themselves."""

from benchmarks.bars import BARS
from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Reading, Unit
from benchmarks.sides import Side, read_in_turn

MEASURE = "benchmarks.ours.devices"
STORES: dict[str, dict[str, object]] = {"memory": {"dsn": "memory://"}, "SQLite, FULL": {}}

HEARTBEAT_S = 2.0
"""Of the outages: short, so that many of them fit into a round."""
OUTAGES = {
    "disconnected for 1.5 heartbeats": {"beats": 1.5, "hangs": False},
    "disconnected for 6 heartbeats": {"beats": 6.0, "hangs": False},
    "hung for 6 heartbeats": {"beats": 6.0, "hangs": True},
}


def hang(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    work: dict[str, object] = {"count": settings.pick(full=1_000, quick=500), "devices": 9, "task_s": 0.05}
    contests = [
        Contest(
            "device_hang",
            f"{store}: tasks of 50 ms on 9 devices, beside one that hangs",
            Unit.RATE,
            ours=Side(f"{store}, one hangs", f"{MEASURE}:others", {"hanging": 1, **work, **where}),
            others=[Side("without it", f"{MEASURE}:others", {"hanging": 0, **work, **where})],
        )
        for store, where in STORES.items()
    ]
    return [finding for contest in contests for finding in contest.hold(settings)]


def outage(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    work: dict[str, object] = {"devices": 100, "each": settings.pick(full=2, quick=1), "heartbeat_s": HEARTBEAT_S}
    sides = [Side(kind, f"{MEASURE}:outages", {**work, **how}) for kind, how in OUTAGES.items()]
    readings = read_in_turn(sides, rounds=settings.pick(full=3, quick=1))
    return [finding for kind in OUTAGES for finding in _judge_outages(kind, readings[kind])]


def _judge_outages(kind: str, readings: list[Reading]) -> list[Finding]:
    heartbeat, name = [HEARTBEAT_S] * len(readings), f"a heartbeat of {HEARTBEAT_S:.0f} s"
    title, bar = f"100 devices, {kind}: then idle again after", BARS["device_outage", "a heartbeat"]
    longest, p50 = [reading.value for reading in readings], [reading.also["p50"] for reading in readings]
    return [
        Finding(f"{title}, longest", name, Unit.SECONDS, longest, heartbeat, bar),
        Finding(f"{title}, p50", name, Unit.SECONDS, p50, heartbeat, None),
    ]


def start(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    work: dict[str, object] = {"count": settings.pick(full=1_000, quick=300), "devices": 10, "gap_s": 0.002}
    sides = [Side(store, f"{MEASURE}:start", {**work, **where}) for store, where in STORES.items()]
    readings = read_in_turn(sides, rounds=settings.rounds)
    other = "submit → a plain function in a thread"
    return [
        Finding(
            f"{store}: enqueue → started on an idle device, p50",
            other,
            Unit.SECONDS,
            [reading.value for reading in readings[store]],
            [reading.also["thread"] for reading in readings[store]],
            BARS["device_start", other],
        )
        for store in STORES
    ]


def farm(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"devices": 2_000, "seconds": float(settings.pick(full=60, quick=20))}
    bare = Side("bare heartbeats", "benchmarks.limits.heartbeats:idle", work)
    few = Side("10 devices", f"{MEASURE}:farm", {**work, "devices": 10})
    ours = (
        [] if settings.without_ours else [Side(store, f"{MEASURE}:farm", {**work, **STORES[store]}) for store in STORES]
    )
    readings = read_in_turn([bare, few, *ours] if ours else [bare], rounds=1)
    return [finding for side in ours for finding in _judge_farm(side.name, bare.name, few.name, readings)]


def _judge_farm(store: str, bare: str, few: str, readings: dict[str, list[Reading]]) -> list[Finding]:
    def also(side: str, what: str) -> list[float]:
        return [reading.also[what] for reading in readings[side]]

    cpu, core = [reading.value for reading in readings[store]], "a core"
    bare_cpu = [reading.value for reading in readings[bare]]
    title = f"{store}: 2,000 idle devices, heartbeat of 10 s"
    return [
        Finding(f"{title}: processor time a second", core, Unit.SECONDS, cpu, [1.0], BARS["device_farm", core]),
        Finding(f"{title}: processor time a second", bare, Unit.SECONDS, cpu, bare_cpu, None),
        Finding(f"{title}: until all are up", bare, Unit.SECONDS, also(store, "up"), also(bare, "up"), None),
        Finding(f"{title}: memory of each", bare, Unit.BYTES, also(store, "memory"), also(bare, "memory"), None),
        Finding(f"{title}: calls of the store", few, Unit.RATE, also(store, "calls"), also(few, "calls"), None),
    ]


def drain(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=5_000, quick=2_000), "devices": 50}
    contests = [
        Contest(
            "device_drain",
            f"{store}: no-op tasks on 50 devices",
            Unit.RATE,
            ours=Side(f"{store}, devices", f"{MEASURE}:drain", {**work, **where}),
            others=[Side("a plain consumer, 50 at once", f"{MEASURE}:plain_drain", {**work, **where})],
        )
        for store, where in STORES.items()
    ]
    return [finding for contest in contests for finding in contest.hold(settings)]
