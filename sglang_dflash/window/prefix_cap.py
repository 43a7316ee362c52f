"""Under a draft window, the last tokens of a prefix-cache hit are computed again: the drafter needs them.

The prefix cache keeps the target's K/V. What the drafter reads of a prompt comes from the target's hidden states, which
nothing keeps, and lives in the ring of the request that computed it. So a hit ends a window before the end of the
prompt: the prefill recomputes at most that many tokens, and the first block already sees its whole window.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.window.served import served_window


def cap_prefix(longest: int, req: Any, input_len: int) -> int:
    """After SGLang's bound on a request's reusable prefix: leave the window's tokens to the prefill.

    Args:
        longest: SGLang's own bound, tokens.
        input_len: tokens of the request so far.
    """
    window = served_window()
    return longest if window is None else max(0, min(longest, input_len - window.tokens))
