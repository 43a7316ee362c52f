"""Recurrent states of a hybrid target: one per request, replayed from records of draft tokens."""
