"""Documents that cannot drift: what they name exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import taskyard
from tests.docs.blocks import TOP, documents

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)\)")
MAKE = re.compile(r"`?make ([a-z]+)\b")
PATHS = re.compile(r"`((?:src|tests|docs|examples|benchmarks|scripts|requirements)/[\w./-]*)`")

ids = [str(path.relative_to(TOP)) for path in documents()]


@pytest.mark.parametrize("path", documents(), ids=ids)
def test_links_lead_somewhere(path):
    """Every link to a file of ours leads to one."""
    links = [link for link in LINK.findall(path.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", documents(), ids=ids)
def test_paths_exist(path):
    """Every path of the tree that a document names is there."""
    named = [name for name in PATHS.findall(path.read_text("utf-8")) if "NNNN" not in name]
    assert [name for name in named if not (TOP / name).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/ARCHITECTURE.md"])
def test_make_targets_exist(name):
    """Every `make` target that is named is one."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (TOP / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(MAKE.findall((TOP / name).read_text("utf-8"))) <= targets


def test_every_package_is_on_the_map():
    """The architecture's map shows every package and module of the first level, but no other."""
    text = (TOP / "docs" / "ARCHITECTURE.md").read_text("utf-8")
    [tree] = re.findall(r"<!-- the tree -->\n```\n(.*?)```", text, re.DOTALL)
    shown = {name.removesuffix(".py") for line in tree.splitlines() for name in re.findall(r"^(\w+)(?:/|\.py)", line)}
    there = {module.name for module in pkgutil.iter_modules(taskyard.__path__)}
    assert shown == there


def test_the_public_names_are_there():
    """`taskyard` offers at most 60 names; each exists, and they are in order."""
    assert len(taskyard.__all__) <= 60
    assert taskyard.__all__ == sorted(taskyard.__all__, key=lambda name: (name[0].islower(), name))
    assert [name for name in taskyard.__all__ if not hasattr(taskyard, name)] == []


def test_the_names_of_the_designs_are_there():
    """The names that the source designs import from `taskyard` can be imported from it."""
    names = """
        AlgorithmSpec BaseTaskConsumer EmulatorAdapter ErrorKind ExecutionDispatcher ExecutionError ExecutionHints
        ExecutionPolicy ExecutionRequest ExecutionResult ExecutorManager ExecutorProtocol ExecutorService
        InProcessExecutor IsolatedProcessPoolExecutor MockExecutor NoopExecutor ProcessPoolExecutor QueueController
        QueueItem Scheduler Task TaskConsumerRegistry TaskRun ThreadExecutor WorkerActor WorkerHandle
        get_executor_manager
    """
    assert [name for name in names.split() if not hasattr(taskyard, name)] == []


def test_a_yard_shows_what_a_user_may_call():
    """Every public name of a yard is documented, and the parts behind it are not among them."""
    yard = taskyard.Yard("memory://")
    shown = {name for name in dir(yard) if not name.startswith("_")}
    assert [name for name in sorted(shown) if not getattr(taskyard.Yard, name, yard.schedules).__doc__] == []
    assert shown.isdisjoint({"engine", "loop", "own_loop", "prepare", "encode", "find_parent"})


def test_what_is_seldom_used_is_imported_when_it_is_asked_for():
    """`import taskyard` loads neither algorithms nor Pydantic; the names are there all the same."""
    code = (
        "import sys, taskyard; print({'pydantic', 'taskyard.execution.router'} & {*sys.modules}); "
        "taskyard.ExecutionDispatcher; print('taskyard.execution.router' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=50, capture_output=True, text=True).stdout
    assert said == "set()\nTrue\n"


def test_every_module_says_what_it_owns():
    """Every module of the package begins with a sentence on its subject."""
    importlib.import_module("taskyard.testing.contract")  # before its parts, which it has pytest rewrite
    for module in pkgutil.walk_packages(taskyard.__path__, "taskyard."):
        if not module.name.endswith("__main__"):
            assert importlib.import_module(module.name).__doc__, module.name


ADRS = sorted((TOP / "docs" / "adr").glob("*.md"))


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.stem)
def test_a_record_has_its_parts(path: Path):
    """A decision record has a number that is its file's, a status, a context, a decision and consequences."""
    text = path.read_text("utf-8")
    assert text.startswith(f"# {int(path.name[:4])}. ")
    assert re.search(r"^(Proposed|Accepted|Replaced by \d{4})\.$", text, re.MULTILINE)
    assert [part for part in ("## Context", "## Decision", "## Consequences") if part not in text] == []


def test_records_are_numbered_without_gaps():
    """The records are numbered from 1 on, none missing."""
    assert [int(path.name[:4]) for path in ADRS] == list(range(1, len(ADRS) + 1))
