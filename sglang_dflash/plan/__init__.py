"""The serving plan: everything that is decided before a server runs, in one frozen object.

:mod:`.decide` makes it from the arguments, the two configurations and the machine; :mod:`.serving` is what the rest of
the package reads. ``sglang-dflash check`` makes the same plan for a server that is not there yet.
"""
