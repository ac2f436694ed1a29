"""The libraries of the extra `devices`, imported where they are first needed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from taskyard.errors import InvalidInput


def require_extra(library: str) -> None:
    """Look for a library of the extra `devices`, without importing it. Without it, the error says how to install it."""
    # None in `sys.modules` keeps a module from being imported.
    if sys.modules.get(library, ...) is None or find_spec(library) is None:
        raise InvalidInput(
            f"{library} is not installed", hint="`pip install taskyard[devices]` installs what devices need"
        )


def import_extra(library: str) -> Any:
    """A library of the extra `devices`."""
    require_extra(library)
    return import_module(library)
