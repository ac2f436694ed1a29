"""P19: many clients submit the same work at once, some are killed over it, and one task comes of it."""

import asyncio
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

from taskyard import TaskRecord, Yard
from taskyard.testing.faults import POINTS, phase_of
from tests.torture.figures import Figures
from tests.torture.procs import Child, Troop
from tests.torture.work import ledger_of, make_yard

PROCESSES, CLIENTS = 4, 8


def run(where: Path, *, trials: int, seed: int) -> Figures:
    rng = random.Random(seed)
    ledger = ledger_of(where)
    troop = Troop(where, ledger)
    figures = Figures(f"P19 {PROCESSES * CLIENTS} clients, one dedupe key", 0)
    answers: defaultdict[str, set[str]] = defaultdict(set)
    with troop.gathered():
        for number in range(trials):
            while len(troop.living) < PROCESSES - 1:
                troop.start("dedupe", ready=True, clients=CLIENTS)
            victim = troop.start("dedupe", ready=True, clients=CLIENTS, fault=_aim(rng))
            key = f"key-{number}"
            for child in rng.sample(troop.living, PROCESSES):
                child.write(key)
            _kill(troop, victim, rng)
            for child in troop.living:
                answers[key] |= _answers(child, key)
            figures.trials += 1
    records = asyncio.run(_read(make_yard(where, ledger)))
    ledger.close()
    figures.failures = troop.failures + _check(answers, records)
    struck = ", ".join(f"{phase} {count}" for phase, count in troop.phases.most_common())
    figures.note = f"{PROCESSES} processes, one killed in each trial ({struck})"
    return figures


def _aim(rng: random.Random) -> str:
    """Half of the victims die by themselves, somewhere in their first submit."""
    points = [point for point in POINTS if phase_of(point) == "submit"]
    return f"{rng.choice(points)}:1" if rng.random() < 0.5 else ""


def _kill(troop: Troop, victim: Child, rng: random.Random) -> None:
    if victim.fault and victim.has_ended(10):
        troop.end(victim)
        return
    time.sleep(rng.random() * 0.01)
    troop.kill(victim)


def _answers(child: Child, key: str) -> set[str]:
    """What a living child's clients were told."""
    told = set()
    for _ in range(CLIENTS):
        answered, _, uuid = child.read().partition(" ")
        if answered != key:
            raise RuntimeError(f"{child.name} answered {answered!r} to {key}: {child.errors()}")
        told.add(uuid)
    return told


async def _read(yard: Yard) -> list[TaskRecord]:
    async with yard.client():
        return await yard.store.list_tasks(limit=1_000_000)


def _check(answers: dict[str, set[str]], records: list[TaskRecord]) -> list[str]:
    made = Counter(record.dedupe_slot for record in records)
    by_uuid = {record.uuid: record for record in records}
    faults = [f"{slot}: {count} tasks" for slot, count in made.items() if count != 1]
    for key, uuids in answers.items():
        slots = {by_uuid[uuid].dedupe_slot if uuid in by_uuid else None for uuid in uuids}
        if len(uuids) != 1 or len(slots) != 1 or not (slots.pop() or "").endswith(f" key {key}"):
            faults.append(f"{key}: the clients were told of {sorted(uuids)}, not of the one task with that key")
    return faults
