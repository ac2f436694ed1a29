"""`taskyard node ls` and `taskyard node drain`."""

import signal
import socket

import pytest

from taskyard.application import nodes
from taskyard.application.errors import AmbiguousNode
from taskyard.application.nodes import resolve_node
from taskyard.errors import UnknownNode
from taskyard.model.node import Node, NodeStatus
from taskyard.model.state import TaskState
from taskyard.version import VERSION
from tests.cli.shell import LONG_S, Shell


def test_nodes_are_listed_with_what_they_run(shell: Shell) -> None:
    """Each node is a line with its incarnation, name, state, load, host, process, version and queues."""
    worker = shell.start_worker("-v")
    shell.seed(("hold", {}), ("hold", {}))
    for _ in range(2):
        worker.hear("hold has begun")
    (node,) = shell.ok("node", "ls", "--store", shell.url, "--json").json
    assert node.pop("started_at").endswith("Z")
    name, incarnation = node["name"], node["incarnation"]
    assert node == {
        "name": f"{socket.gethostname()}-{worker.process.pid}",
        "incarnation": incarnation,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": worker.process.pid,
        "queues": ["cpu", "default"],
        "consumers": ["add", "boom", "outputs", "flaky", "hold", "until", "stubborn", "deaf", "sleeper"],
        "running": 2,
        "draining": False,
        "stopping": False,
        "alive": True,
        "beat_at": None,
        "clock_ahead_s": None,
    }
    head, line = shell.here("node", "ls", "--store", shell.url).out.splitlines()
    assert head.split() == ["NODE", "NAME", "STATE", "RUNNING", "SINCE", "HOST", "PID", "VERSION", "QUEUES"]
    for text in (incarnation[:8], name, "● alive", "  2  ", str(worker.process.pid), VERSION, "cpu, default"):
        assert text in line
    narrow = shell.here("node", "ls", "--store", shell.url, COLUMNS="80").out
    assert max(map(len, narrow.splitlines())) <= 80
    assert incarnation[:8] in narrow


def test_a_dead_node_is_called_dead(shell: Shell) -> None:
    """A worker that was killed is shown as dead for as long as nobody has taken its tasks back."""
    worker = shell.start_worker("-v")
    shell.seed(("hold", {}))
    worker.hear("hold has begun")
    worker.signal(signal.SIGKILL)
    worker.end()
    (node,) = shell.here("node", "ls", "--store", shell.url, "--json").json
    assert (node["alive"], node["running"]) == (False, 1)
    assert "✘ dead" in shell.here("node", "ls", "--store", shell.url).out


def test_without_a_node_it_says_how_to_start_one(shell: Shell) -> None:
    """A store nobody works on has no nodes, and the way to change that is named."""
    shell.seed(("add", {"a": 1}))
    assert "taskyard worker" in shell.here("node", "ls", "--store", shell.url).out
    assert shell.here("node", "ls", "--store", shell.url, "--json").json == []


def test_a_worker_that_is_drained_finishes_and_ends(shell: Shell) -> None:
    """Drained from another process, a worker takes nothing new, records what it runs, leaves, and ends with 0."""
    worker = shell.start_worker("-v", "--grace", "600")
    (running,) = shell.seed(("until", {"path": str(shell.folder / "gate")}))
    worker.hear("until has begun")
    (node,) = shell.here("node", "ls", "--store", shell.url, "--json").json
    said = shell.ok("node", "drain", node["name"], "--store", shell.url).out
    assert "‖ draining; it has 1 task to finish, and takes no new ones" in said
    worker.hear("this node is drained")
    (late,) = shell.seed(("add", {"a": 1}))
    assert "‖ draining" in shell.here("node", "ls", "--store", shell.url).out
    (shell.folder / "gate").touch()
    assert worker.end() == 0
    assert "drained: nothing runs here any more" in worker.said
    assert [shell.record(uuid).state for uuid in (running, late)] == [TaskState.COMPLETED, TaskState.QUEUED]
    assert shell.here("node", "ls", "--store", shell.url, "--json").json == []


def test_a_drain_can_be_taken_back(shell: Shell) -> None:
    """--undo, on the beginning of an incarnation, lets a worker that still runs something take tasks again."""
    worker = shell.start_worker("-v", "--grace", "600")
    shell.seed(("hold", {}))
    worker.hear("hold has begun")
    (node,) = shell.here("node", "ls", "--store", shell.url, "--json").json
    asked = shell.here("node", "drain", node["incarnation"][:8], "--store", shell.url, "--json").json
    assert (asked["incarnation"], asked["draining"], asked["running"]) == (node["incarnation"], True, 1)
    assert asked["acknowledged"]
    worker.hear("this node is drained")
    (waiting,) = shell.seed(("add", {"a": 1}))
    undone = shell.here("node", "drain", node["incarnation"][:8].upper(), "--undo", "--store", shell.url).out
    assert "● alive; it takes tasks again" in undone
    worker.hear(f"completed add {waiting}")


def test_a_drain_that_is_not_acknowledged_is_said_to_be_so(shell: Shell, monkeypatch) -> None:
    """A node that hangs is not called drained; when it goes on, it hears of it."""
    monkeypatch.setattr(nodes, "ACK_TIMEOUT_S", 0.2)
    worker = shell.start_worker("-v")
    (node,) = shell.here("node", "ls", "--store", shell.url, "--json").json
    worker.signal(signal.SIGSTOP)
    said = shell.here("node", "drain", node["name"], "--store", shell.url)
    assert (said.code, "drained" in said.out) == (0, False)
    assert "? not acknowledged; it was asked to drain, and has not answered" in said.out
    assert shell.here("node", "drain", node["name"], "--store", shell.url, "--json").json["acknowledged"] is False
    worker.signal(signal.SIGCONT)
    assert worker.end() == 0
    assert "this node is drained" in worker.said


def test_run_stays_when_it_is_drained(shell: Shell) -> None:
    """`taskyard run` says that it is drained, and goes on until it is stopped."""
    running = shell.start("run", "app:yard")
    running.hear("is running")
    (node,) = shell.here("node", "ls", "--store", shell.url, "--json").json
    shell.ok("node", "drain", node["name"], "--store", shell.url)
    assert "--undo" in running.hear("drained: nothing runs here any more")
    assert "‖ drained" in shell.here("node", "ls", "--store", shell.url).out
    running.signal(signal.SIGTERM)
    assert running.end() == 0


def test_a_node_that_is_not_there_is_refused(shell: Shell) -> None:
    """A name nobody has, and too little of an incarnation, are refused with 1, and nothing is drained."""
    worker = shell.start_worker()
    (node,) = shell.here("node", "ls", "--store", shell.url, "--json").json
    for given in ("nobody", node["incarnation"][:3], ""):
        done = shell.here("node", "drain", given, "--store", shell.url)
        assert (done.code, done.out) == (1, "")
        assert f"no node {given!r} is on this store" in done.err
    assert shell.here("node", "drain", "nobody", "--store", shell.url, "--json").err.startswith(
        '{"code":"unknown_node"'
    )
    assert not shell.here("node", "ls", "--store", shell.url, "--json").json[0]["draining"]
    worker.signal(signal.SIGTERM)
    worker.process.wait(timeout=LONG_S)


def test_nodes_of_one_name_are_told_apart() -> None:
    """A name that several nodes have finds none of them; the beginning of an incarnation does."""

    def status(incarnation: str, name: str) -> NodeStatus:
        return NodeStatus(node=Node(incarnation=incarnation, name=name, pid=1, host="here"), running=0)

    twins = [status("aaaa1111", "twin"), status("aaaa2222", "twin"), status("bbbb3333", "aaaa1111x")]
    with pytest.raises(AmbiguousNode, match=r"twin \(aaaa1111\), twin \(aaaa2222\)"):
        resolve_node(twins, "twin")
    with pytest.raises(AmbiguousNode):
        resolve_node(twins, "aaaa")
    assert resolve_node(twins, "aaaa2").node.incarnation == "aaaa2222"
    assert resolve_node(twins, "aaaa1111x").node.incarnation == "bbbb3333"
    with pytest.raises(UnknownNode):
        resolve_node(twins, "twi")
