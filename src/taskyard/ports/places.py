"""The places where the tasks of a consumer run, one task at a time each: GPUs, licences, devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.given import check_labels, check_name


class Place(msgspec.Struct, frozen=True):
    """A place has a name, which its attempts keep, and labels, which a task may require."""

    name: str
    labels: dict[str, str] = {}


class Places:
    """The places of one consumer. They may be added, removed and made ready at any time, from any thread: a task starts
    only at a place that is ready and has no other task. A task that runs at a place that is removed, or is no longer
    ready, goes on."""

    def __init__(self, places: Iterable[Place | str] = ()) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}
        self._not_ready: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self.version = 0
        """Changes with every place that is added, removed or given other labels; not with what is ready."""
        self.changes = 0
        """Grows with every change, also of what is ready."""
        if isinstance(places, str):
            raise InvalidInput(f"places must be a list of places or names, not {quote(places)}")
        for count, place in enumerate(places, 1):
            self._put(place, is_ready=True)
            if len(self._places) < count:
                raise InvalidInput(f"two places have one name: {quote(list(self._places))}")

    def __iter__(self) -> Iterator[Place]:
        """All of them, ready or not, in the order in which they were added."""
        with self._lock:
            return iter(list(self._places.values()))

    def __len__(self) -> int:
        return len(self._places)

    def ready(self) -> list[Place]:
        with self._lock:
            return [place for place in self._places.values() if place.name not in self._not_ready]

    def add(self, place: Place | str, *, is_ready: bool = True) -> None:
        """Add a place, or give the one of this name other labels."""
        self._put(place, is_ready=is_ready)
        self._tell()

    def remove(self, name: str) -> None:
        with self._lock:
            self._known(name)
            del self._places[name]
            self.version += 1
            self.changes += 1
            self._not_ready.discard(name)
        self._tell()

    def set_ready(self, name: str, is_ready: bool) -> None:
        with self._lock:
            self._known(name)
            if is_ready is (name not in self._not_ready):
                return
            self._mark(name, is_ready)
        self._tell()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change, on the thread that made it, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _put(self, given: Place | str, *, is_ready: bool) -> None:
        place = Place(given) if isinstance(given, str) else given
        if not isinstance(place, Place):
            raise InvalidInput(f"a place must be a Place or the name of one, not {quote(given)}")
        place = Place(check_name("the name of a place", place.name), check_labels(place.labels))
        with self._lock:
            if self._places.get(place.name) != place:
                self._places[place.name] = place
                self.version += 1
            self._mark(place.name, is_ready)

    def _mark(self, name: str, is_ready: bool) -> None:
        self.changes += 1
        if is_ready:
            self._not_ready.discard(name)
        else:
            self._not_ready.add(name)

    def _known(self, name: str) -> None:
        if name not in self._places:
            known = ", ".join(map(repr, self._places)) or "none"
            raise InvalidInput(f"there is no place {quote(name)}; there are {known}")

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()
