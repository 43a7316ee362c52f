"""Recurrent states of a hybrid target: one per request, replayed from what draft tokens write.

A verify must be able to return to the state after any of its tokens. SGLang keeps every one of those states; a replay
keeps what each token wrote and adds it up at the commit, at about 2 % of the memory.

=====================  ==========================================================================
:mod:`.choice`         keep or replay: the rule, the memory both take, the user's switches
:mod:`.pool`           lift SGLang's refusal of a replay for DFLASH, charge what it forgets, lay out kept states
:mod:`.replay`         the replay's two operations, and the verify in place of SGLang's kernel
:mod:`.reference`      their definitions in torch; ``kernels/`` has a Triton kernel of each
:mod:`.commit`         the stage of a decode step that advances the states
=====================  ==========================================================================
"""
