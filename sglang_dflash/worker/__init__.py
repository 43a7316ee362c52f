"""The DFLASH worker: one file per stage of a decode step, put in order by :mod:`.worker`.

``sampling/`` chooses the target's tokens, ``start/`` prepares a server, ``observe/`` reports what happened.
"""
