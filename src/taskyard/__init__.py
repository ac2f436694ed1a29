"""Taskyard runs tasks: when they are due, in the right order, within limits, and without losing any."""
