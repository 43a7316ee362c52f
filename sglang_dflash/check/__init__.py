"""Preflight: does the drafter fit the target, does the pair start and fit into memory? Reads no weights."""
