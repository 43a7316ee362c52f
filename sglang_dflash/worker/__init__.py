"""The DFLASH worker: one file per stage of a decode step; :mod:`.worker` runs them in order.

``sampling/`` chooses the target's tokens, ``start/`` prepares a server, ``observe/`` counts and times steps.
"""
