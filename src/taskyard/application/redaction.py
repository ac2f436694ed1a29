"""The redaction of documents is that of log lines: see `model.redaction`."""

from taskyard.model.redaction import Redactor, redact

__all__ = ["Redactor", "redact"]
