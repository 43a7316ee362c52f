"""Sampling parameters of a block's rows: each request has one row of logits for every block position."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_dflash.upstream import SamplingBatchInfo


def for_block(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """The sampling parameters of bs requests, repeated for the bs * width rows of a block, ``custom_params`` aside."""
    if info.is_all_greedy and not info.has_custom_logit_processor:
        return info  # the sampler takes the argmax and reads nothing per row
    repeat = partial(torch.repeat_interleave, repeats=width, dim=0)
    rows: dict[str, Any] = {
        name: repeat(value)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if (value := getattr(info, name)) is not None
    }
    if info.has_custom_logit_processor:
        offsets = torch.arange(width, device=info.temperatures.device)
        rows["custom_logit_processor"] = {
            key: dataclasses.replace(
                entry,
                rows=[row * width + j for row in entry.rows for j in range(width)],
                indices=(entry.indices[:, None] * width + offsets).flatten(),
            )
            for key, entry in info.custom_logit_processor.items()
        }
    return dataclasses.replace(info, **rows)
