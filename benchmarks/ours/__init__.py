"""Taskyard's side of every scenario: the only folder here that knows its API."""
