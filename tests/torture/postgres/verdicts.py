"""A node that is taken for dead and beats again before anything was taken from it keeps what it runs."""

import random
import signal
import time
from pathlib import Path

from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures
from tests.torture.mutations import THINK_S, THOUGHT
from tests.torture.postgres.crew import Crew, await_
from tests.torture.postgres.mutations import mutate
from tests.torture.postgres.site import open_site
from tests.torture.verdict import drain_and_judge


def run(where: Path, *, trials: int, seed: int, databases: Databases | None = None, mutation: str = "") -> Figures:
    """The other node takes its time between the verdict and the deed; meanwhile the first one goes on."""
    figures = Figures("PostgreSQL: a node that beats again keeps its tasks", 0)
    with open_site(where, databases=databases) as site:
        folder = site.make_folder()
        if mutation:
            mutate(site, folder, mutation)
        crew = Crew(folder, random.Random(seed), nodes=2, dying_s=0.01, mutation="think-before-rescue")
        with crew.gathered():
            while figures.trials < trials:
                crew.submit("guard", {"gate": f"gate-{figures.trials}"})
                _trial(crew)
                (folder / f"gate-{figures.trials}").touch()
                await_(lambda: crew.unfinished() == 0, "that the task ends")
                figures.trials += 1
        faults, _ = drain_and_judge(folder)
    figures.failures += crew.troop.failures + faults
    return figures


def _trial(crew: Crew) -> None:
    """Whoever runs the task stands still until the other has decided, then goes on before that one acts."""
    node = await_(lambda: next((n for n in crew.nodes() if crew.seen.held_by(n.pid)), None), "that the task starts")
    (heir,) = (other for other in crew.nodes() if other is not node)
    decided = heir.count(THOUGHT)
    node.signal(signal.SIGSTOP)
    await_(lambda: heir.count(THOUGHT) > decided, "the verdict")
    node.signal(signal.SIGCONT)
    time.sleep(THINK_S + 0.5)  # by then the deed would be done, and the task be started again
