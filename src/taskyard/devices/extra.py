"""The libraries of the extra `devices`, imported where they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from taskyard.errors import InvalidInput


def import_extra(library: str) -> Any:
    """A library of the extra `devices`. Without it, the error says how to install it."""
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        # A library that is there, but lacks one of its own, tells more by its own error.
        if error.name != library:
            raise
        raise InvalidInput(
            f"{library} is not installed", hint="`pip install taskyard[devices]` installs what devices need"
        ) from None
