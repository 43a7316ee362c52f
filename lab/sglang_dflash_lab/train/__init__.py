"""How the shipped pairs were trained and measured, and the reference decoder that measures them.

Nothing here is needed to use a pair; see :mod:`sglang_dflash_lab.pairs`.
"""
