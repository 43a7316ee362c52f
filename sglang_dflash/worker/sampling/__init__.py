"""Sampling of the target's token at every block position: penalties, processors' history, seeds."""
