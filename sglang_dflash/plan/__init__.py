"""Decisions before a server runs, from arguments, configurations and a machine that are read once.

:mod:`.settings` and :mod:`.pair` read, :mod:`.rules` checks, :mod:`.plan` decides, :mod:`.serving` holds the plan.
``sglang-dflash check`` makes the same plan.
"""
