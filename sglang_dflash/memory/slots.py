"""How many recurrent states a running request holds between steps."""

from __future__ import annotations

from typing import Any


def slots_per_request(args: Any) -> int:
    """Its own, the prefix cache's share, and the snapshots of ``extra_buffer``: SGLang's ``_calculate_mamba_ratio``.

    Args:
        args: server arguments by SGLang's names.
    """
    if args.disable_radix_cache:
        return 1
    if args.mamba_radix_cache_strategy == "no_buffer":
        return 3
    lazy = args.mamba_radix_cache_strategy == "extra_buffer_lazy"
    return 3 + (1 if lazy or args.disable_overlap_schedule else 2)
