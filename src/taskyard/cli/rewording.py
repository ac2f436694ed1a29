"""Errors of the library in the words of the command line: who typed `--timeout` is not told about `timeout_s`.

Only what the library says of its own parameters is reworded. What is quoted was typed or stored by somebody, and errors
that carry the words of others, such as those of a consumer about its arguments, stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from taskyard.cli.errors import UsageError
from taskyard.errors import DuplicateTask, InvalidInput, NaiveDatetime, shorten

_TASK = {"priority": "--priority", "queue": "--queue", "key": "--key", "timeout_s": "--timeout"}

_FILTER = {"queue": "--queue", "consumer": "--consumer"}
_CHOICE = _FILTER | {"key": "--key", "error": "--error"}

OPTIONS: dict[str, dict[str, str]] = {
    "submit": _TASK
    | {
        "delay_s": "--delay",
        "schedule_at": "--at",
        "bucket": "--bucket",
        "after": "--after",
        "on_failure": "--on-failure",
        "dedupe": "--dedupe",
        "dedupe_key": "--dedupe-key",
        "dedupe_scope": "--dedupe-scope",
        "dedupe_window_s": "--dedupe-window",
        "title": "--title",
    },
    "schedule add": _TASK
    | {
        "zone": "--zone",
        "seconds of an interval": "--every",
        "missed": "--missed",
        "catch_up_s": "--catch-up",
        "grace_s": "--grace",
        "overlap": "--overlap",
        "jitter_s": "--jitter",
        "start_at": "--from",
        "end_at": "--to",
    },
    "schedule backfill": {"start": "--from", "end": "--to"},
    "schedule pause": {"note": "--note"},
    "queue pause": {"reason": "--reason"},
    "queue stop-after-current": {"reason": "--reason"},
    "queue set": {"reason": "--reason"},
    "group cancel": {"reason": "--reason"},
    "ls": _FILTER,
    "failures": _FILTER | {"error": "--error"},
    "cancel": _CHOICE | {"reason": "--reason"},
    "skip": _CHOICE | {"reason": "--reason"},
    "hold": _CHOICE | {"reason": "--reason"},
    **dict.fromkeys(("start", "retry", "run-again", "release", "priority", "reschedule"), _CHOICE),
}
"""By command, from the parameter that the library speaks of to the option that was typed."""

PHRASES = {
    "gives you its handle": "gives you its id",
    ", or None for no bound": "",
    "again=True (--again)": "--again",
}
"""What else is said to programmers only."""

REWORDED = (InvalidInput, NaiveDatetime, DuplicateTask)
"""Of these classes themselves: those derived from them carry words of others, or name no parameter."""

_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_REFUSED_NUMBER = re.compile(r", not [\d.]+(?:e\+\d+)?(?=;|$)")
_WORDS = r"'\w+'(?:(?:, | or )'\w+')*"


def reword(error: BaseException, arguments: Sequence[str]) -> None:
    """Let the error that the command line `arguments` came to speak of its options."""
    options = next((OPTIONS[name] for n in (2, 1) if (name := " ".join(arguments[:n])) in OPTIONS), None)
    said_by = error.__cause__ if isinstance(error, UsageError) else error
    if options is not None and type(said_by) in REWORDED:
        error.args = (_as_typed(_reword(str(error), options), arguments),)


def _as_typed(text: str, arguments: Sequence[str]) -> str:
    """The number that an option was understood as, as it stands on the command line: `0`, not `0.0`."""
    option, typed = text.partition(" ")[0], None
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name == option:  # the last one counts
            typed = shorten(value if equals else following)
    return text if typed is None else _REFUSED_NUMBER.sub(lambda _: f", not {typed}", text)


def _reword(text: str, options: Mapping[str, str]) -> str:
    """A name that is also a word of English is a parameter where the text begins with it, or where it has a value."""
    phrases = "|".join(map(re.escape, PHRASES))
    names = "|".join(sorted(options, key=len, reverse=True))
    plain = "|".join(name for name in options if "_" in name) or "(?!)"
    valued, first = rf"(?P<valued>{names})=(?P<words>{_WORDS})?", rf"(?<!.)(?P<first>{names})\b"
    pattern = rf"(?P<phrase>{phrases})|(?<![\w-])(?:{valued}|{first}|(?P<plain>{plain})\b)|{_QUOTED}"

    def put(found: re.Match[str]) -> str:
        if found["phrase"] is not None:
            return PHRASES[found["phrase"]]
        if found["valued"] is not None:
            return f"{options[found['valued']]} " + (found["words"] or "").replace("'", "")
        name = found["first"] or found["plain"]
        return found[0] if name is None else options[name]

    return re.sub(pattern, put, text, flags=re.DOTALL)
