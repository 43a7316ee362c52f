"""The target's tokens."""
