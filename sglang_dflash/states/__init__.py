"""Recurrent states of a hybrid target: one per request, replayed from the records of draft tokens.

A verify must be able to return to the state after any of its tokens. SGLang keeps every one of those states. A replay
records what each token writes and adds up the accepted records at the commit, in about 2 % of the memory.
"""
