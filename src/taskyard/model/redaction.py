"""Secrets among the data of a task: what counts as one, and how it is kept out of documents.

A value is a secret if a word of its name says so, as in `api_key`. The value is replaced by `***`, and so is the same
text in messages and tracebacks of the task, and any password inside a URL.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from taskyard.errors import HIDDEN, TaskEnded, hide_password
from taskyard.model.task import TaskRecord

T = TypeVar("T")

MIN_SECRET_CHARS = 4
"""Characters: hiding shorter secrets would blot out half of any text."""

_SECRET_WORDS = frozenset({
    "password", "passwd", "pwd", "passphrase", "passcode", "secret", "secrets", "token", "tokens", "key", "keys",
    "apikey", "credential", "credentials", "auth", "authorization", "bearer", "cookie", "cookies", "otp", "pin",
})  # fmt: skip
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Redactor:
    """Keeps the secrets of one task out of its documents. With `reveal` it hides nothing."""

    def __init__(self, record: TaskRecord, *, reveal: bool = False) -> None:
        args = decode(record.args)
        self._secrets = set() if reveal else collect_secrets(args) | collect_secrets(record.values)
        self._reveal = reveal
        self.args: Any = args if reveal else redact(args)
        self.values: dict[str, Any] = record.values if reveal else self._without_secrets(redact(record.values))
        """The values that middleware has added."""
        result = None if record.result is None else decode(record.result)
        self.result: Any = result if reveal else redact(result)

    def text(self, text: str) -> str:
        """A message or traceback without the secrets among the arguments and the values of middleware."""
        return text if self._reveal else hide_secrets(text, self._secrets)

    def value(self, value: T) -> T:
        """A stored value of the same type, its texts without those secrets."""
        if value is None or self._reveal:
            return value
        return msgspec.convert(self._without_secrets(msgspec.to_builtins(value)), type(value))

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {name: self._without_secrets(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_secrets(one) for one in value]
        return value

    def error(self, ended: TaskEnded) -> TaskEnded:
        """The same error, its message and its fields without those secrets."""
        ended.args = (self.text(str(ended)),)
        for name, value in vars(ended).items():
            if isinstance(value, str):
                setattr(ended, name, self.text(value))
        return ended


def decode(text: str) -> Any:
    """Stored JSON; text that another program wrote and that is not JSON stays as it is."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def is_secret_name(name: str) -> bool:
    """Whether a value of this name is a secret: one of the words in the name says so."""
    return any(word.lower() in _SECRET_WORDS for word in _WORDS.findall(name))


def redact(value: Any) -> Any:
    """A copy of JSON data with the values of secret names hidden, and the passwords inside of URLs."""
    if isinstance(value, dict):
        return {k: HIDDEN if is_secret_name(str(k)) and v not in (None, "") else redact(v) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(one) for one in value]
    return hide_password(value) if isinstance(value, str) else value


_SAMPLES = frozenset({"default", "examples", "example"})
"""Keywords of a JSON schema whose value is data; only people read it."""


def redact_schema(schema: Any, *, is_secret: bool = False) -> Any:
    """A JSON schema without the defaults and examples of properties with a secret name, and without secrets inside of
    others. What it accepts stays the same."""
    if isinstance(schema, list):
        return [redact_schema(one, is_secret=is_secret) for one in schema]
    if not isinstance(schema, dict):
        return schema
    shown: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("const", "enum"):
            shown[name] = value
        elif name in _SAMPLES:
            if not is_secret or value is None:
                shown[name] = redact(value)
        elif name in ("properties", "$defs") and isinstance(value, dict):
            shown[name] = {
                key: redact_schema(one, is_secret=name == "properties" and is_secret_name(key))
                for key, one in value.items()
            }
        else:
            shown[name] = redact_schema(value, is_secret=is_secret)
    return shown


def collect_secrets(value: Any) -> set[str]:
    """The texts that `redact` would hide in `value`: an error may quote them."""
    found: set[str] = set()
    if isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, str | int) and is_secret_name(str(name)):
                found.add(str(one))
            else:
                found |= collect_secrets(one)
    elif isinstance(value, list):
        for one in value:
            found |= collect_secrets(one)
    return {text for text in found if len(text) >= MIN_SECRET_CHARS}


def hide_secrets(text: str, secrets: set[str]) -> str:
    """`text` without the secrets of its task, longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return hide_password(text)
