"""An SGLang plugin that makes every draft the drafter's best token, for comparisons.

It is active in the server of a ``best`` arm, and changes the definition before the kernels' module reads it.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang_dflash.ops.reference import model

    model.UNSURE = 0.0  # no probability is smaller
