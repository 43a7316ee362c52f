"""A decode step as data: the block, the state between steps, and the queue of launched steps."""
