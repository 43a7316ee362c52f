"""Training and measurement of the shipped pairs, and the reference decoder."""
