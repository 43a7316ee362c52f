"""``sglang-dflash diagnose URL``: how much drafting helps on a running server, and what limits it."""
