"""Recurrent states of a hybrid target: one per request, replayed from records of draft tokens.

SGLang keeps the state after every draft token; a replay records what each token writes, in about 2 % of the memory.
"""
