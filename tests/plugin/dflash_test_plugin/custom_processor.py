"""A custom logit processor: requests name its class, no mode of the plugin does."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class BanAFifth(CustomLogitProcessor):
    """Bans a fifth of the vocabulary, another one after every token: a history that lags by one token shows."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or (), strict=True):
            row[len(params["__req__"].output_ids) % 5 :: 5] = -torch.inf
        return logits
