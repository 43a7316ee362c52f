"""Decisions before a server runs, from arguments, configurations and a machine that are read once."""
