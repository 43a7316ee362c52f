"""Recurrent states of a hybrid target: one per request, replayed from records of draft tokens.

A verify must be able to return to the state after any of its tokens. Instead of keeping all these states, as SGLang
does, a replay records what each token writes and adds up the accepted records, in about 2 % of the memory.
"""
