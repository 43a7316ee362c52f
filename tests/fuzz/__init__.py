"""Hostile input for everything this package reads (docs/security.md)."""
