"""One Triton kernel per file, each equal to its definition in :mod:`sglang_dflash.states.reference`."""
