"""Weight updates of a running server, for trainers: ``requests`` in its processes, and ``writes`` in a scheduler."""
