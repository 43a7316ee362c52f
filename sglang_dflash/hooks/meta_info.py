"""``meta_info`` counts the drafts that were verified, where SGLang takes every step for one of the full width."""

from __future__ import annotations

from typing import Any

from sglang_dflash.upstream import get_spec


def count_verified_drafts(_: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """After ``TokenizerManager._calculate_spec_decoding_metrics``, for blocks of more than one width.

    Such a worker reports each block's verified positions (``cap_lens``), and SGLang their sum; each step's anchor is
    among them. ``spec_cap_length`` is then the mean width.
    """
    if get_spec().speculative_algorithm != "DFLASH" or "spec_cap_length" not in meta_info:
        return
    drafts = recv_obj.spec_num_cap_tokens[i] - recv_obj.spec_verify_ct[i]
    meta_info["spec_num_proposed_drafts"] = drafts
    meta_info["spec_accept_rate"] = recv_obj.spec_num_correct_drafts[i] / drafts if drafts else 0.0
