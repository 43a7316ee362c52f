"""Recurrent states of a hybrid target: one per request, replayed from the records of draft tokens.

A verify must be able to return to the state after any of its tokens. SGLang keeps every one of those states. A replay
records what each token writes to the state and adds the accepted records up at the commit, in about 2 % of the memory.

===================  ================================================================================
:mod:`.replay`       the replay's two operations, and the hooks into SGLang's pool and verify
:mod:`.reference`    their definitions in torch; ``kernels/`` has a Triton kernel of each
:mod:`.commit`       the stage of a decode step that advances the states
===================  ================================================================================

:mod:`sglang_dflash.plan.plan` chooses between keeping and replaying.
"""
