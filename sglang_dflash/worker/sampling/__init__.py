"""The target's own token at every block position."""
