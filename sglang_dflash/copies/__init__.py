"""Copied blocks: what a request repeats of its own prompt and output is drafted by copying it."""
