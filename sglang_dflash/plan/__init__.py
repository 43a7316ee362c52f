"""Everything that is decided before a server runs, from arguments, configurations and machine that are read once.

:mod:`.settings` and :mod:`.pair` read, :mod:`.rules` checks, :mod:`.plan` decides. :mod:`.serving` holds the plan that
the rest of the package reads. ``sglang-dflash check`` makes the same plan for a server that does not run yet.
"""
