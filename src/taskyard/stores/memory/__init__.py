"""The store in memory: the reference, the test oracle, and the engine of the standalone components.

`MemoryCore` is synchronous and single-threaded; `MemoryStore` is the thin asynchronous shell the port asks for. Nothing
here survives the process. Lanes, the due list and the list of the ended drop entries lazily: one counts only while it
still matches its record, so that a change of state, place or priority never searches for it.
"""

from taskyard.stores.memory.core import MemoryCore
from taskyard.stores.memory.store import MemoryStore

__all__ = ["MemoryCore", "MemoryStore"]
