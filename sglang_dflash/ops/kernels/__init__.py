"""One Triton kernel per file, each equal to its definition in :mod:`sglang_dflash.ops.reference`.

Triton compiles a kernel anew for an integer that is 1 or divisible by 16 and for an aligned pointer. Arguments that
change while serving (numbers of tokens, widths, what is a slice) are ``do_not_specialize``, so that nothing is compiled
while requests wait.
"""
