"""The engine: the loops of one node, wired to each other and to a store. `Yard` and `Scheduler` stand on it."""

from taskyard.engine.engine import Engine
from taskyard.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings"]
