"""How many recurrent states a request holds between steps, and how many requests hold some without running."""

from __future__ import annotations

from typing import Any

MAX_RUNNING = 48  # SGLang's for DFLASH, without --max-running-requests


def slots_per_request(args: Any) -> int:
    """Its own, the prefix cache's share, and the snapshots of ``extra_buffer``: SGLang's ``_calculate_mamba_ratio``.

    Args:
        args: server arguments by SGLang's names.
    """
    if args.disable_radix_cache or args.disaggregation_mode == "decode":
        return 1
    if args.mamba_radix_cache_strategy == "no_buffer":
        return 3
    lazy = args.mamba_radix_cache_strategy == "extra_buffer_lazy"
    return 3 + (1 if lazy or args.disable_overlap_schedule else 2)


def in_transfer(args: Any) -> int | None:
    """Requests that hold rows while another server sends their prompt: SGLang's ``handle_pd_disaggregation``.

    Args:
        args: server arguments by SGLang's names; or what a server resolved of them, its ``get_disagg()``.

    Returns:
        None for a server that prefills and decodes.
    """
    if args.disaggregation_mode == "null":
        return None
    if args.disaggregation_mode == "prefill" or args.disaggregation_decode_extra_slots is not None:
        return args.disaggregation_decode_extra_slots or 0
    running = args.max_running_requests or MAX_RUNNING
    return 2 * running if running <= 32 else 0
