"""Calls to worker processes: what is called, how each side calls it, and how that is measured."""
