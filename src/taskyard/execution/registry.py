"""Executors by name: who makes the one that a consumer asks for."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from taskyard.errors import InvalidInput, quote
from taskyard.model.given import check_name
from taskyard.ports.executor import ExecutorFactory, ExecutorProtocol


class ExecutorRegistry:
    """Factories of executors by the names that consumers and algorithms ask for."""

    def __init__(self, factories: Mapping[str, ExecutorFactory] | None = None) -> None:
        self._factories: dict[str, ExecutorFactory] = {}
        for name, factory in (factories or {}).items():
            self.register(name, factory)

    def __contains__(self, name: object) -> bool:
        return name in self._factories

    @property
    def names(self) -> list[str]:
        return list(self._factories)

    def register(self, name: str, factory: ExecutorFactory) -> None:
        """Raises `InvalidInput` if the name is taken or the factory cannot be called."""
        check_factory(name, factory, taken=self._factories)
        self._factories[name] = factory

    def make(self, name: str) -> ExecutorProtocol:
        """A new executor. Raises `InvalidInput` if there is no factory of this name."""
        factory = self._factories.get(name)
        if factory is None:
            raise InvalidInput(f"there is no executor called {name!r} (known: {join_names(self._factories)})")
        return factory()

    def make_all(self) -> dict[str, ExecutorProtocol]:
        """One of each, by name."""
        return {name: factory() for name, factory in self._factories.items()}


def check_factory(name: str, factory: object, *, taken: Container[str]) -> None:
    """Raises `InvalidInput` if `taken` has the name or the factory cannot be called."""
    check_name("the name of an executor", name)
    if name in taken:
        raise InvalidInput(f"an executor called {quote(name)} is there already", hint="give this one another name")
    if not callable(factory):
        raise InvalidInput(
            f"executor {quote(name)} needs a class or function that makes it, not {quote(factory)}",
            hint="leave out the parentheses",
        )


def join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
