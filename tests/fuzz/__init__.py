"""Hostile input for everything this package reads (docs/reliability.md)."""
