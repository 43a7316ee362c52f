"""Hostile input for everything that the package reads: ``python -m tests.fuzz`` prints what came of it."""
