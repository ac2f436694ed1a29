"""Stores: the same contract on memory and on SQLite."""
