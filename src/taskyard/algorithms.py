"""Algorithms and direct calls: what they are written with, limited by, and how they answer. See docs/EXECUTORS.md."""

from taskyard.blocking import BlockingExecutor
from taskyard.errors import InvalidAlgorithm, InvalidOutput, UnknownAlgorithm
from taskyard.execution.algorithm import Algorithm, AlgorithmContext
from taskyard.execution.circuit import CircuitPolicy, CircuitState
from taskyard.execution.desk import AlgorithmHealth
from taskyard.execution.mock import MockExecutor, NoopExecutor
from taskyard.execution.policy import ExecutionPolicy
from taskyard.execution.router import ExecutionDispatcher
from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints, Incident, IncidentKind

__all__ = [
    "Algorithm",
    "AlgorithmContext",
    "AlgorithmHealth",
    "AlgorithmSpec",
    "BlockingExecutor",
    "CircuitPolicy",
    "CircuitState",
    "ExecutionDispatcher",
    "ExecutionHints",
    "ExecutionPolicy",
    "Incident",
    "IncidentKind",
    "InvalidAlgorithm",
    "InvalidOutput",
    "MockExecutor",
    "NoopExecutor",
    "UnknownAlgorithm",
]
