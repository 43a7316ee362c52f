"""Recurrent states of a hybrid target: one per request, replayed from records of draft tokens.

A verify must be able to return to the state after any of its tokens. SGLang keeps all these states; a replay records
what each token writes, in about 2 % of the memory.
"""
