"""SGLang's recurrent scratch, laid out for a block narrower than the server's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def packed(cache: Any, width: int) -> Any:
    """SGLang's ``SpeculativeState`` with ``width`` positions per request, in the same memory.

    A verify kernel is told the block's width and assumes that the scratch has as many rows per request. The commit goes
    by the buffer's shape. The two agree at the server's width and must agree at every other.

    Args:
        cache: its ``intermediate_ssm`` is [layers, rows, block, ...]; the result's [layers, more rows, width, ...].
    """
    states = cache.intermediate_ssm
    layers, rows, block = states.shape[:3]
    rows = rows * block // width
    packed_rows = states.flatten(0, 2)[: layers * rows * width]
    return replace(cache, intermediate_ssm=packed_rows.view(layers, rows, width, *states.shape[3:]))
