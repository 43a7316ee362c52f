"""A server's launch: old flags, the checks, the plan, and the choice of the worker."""
