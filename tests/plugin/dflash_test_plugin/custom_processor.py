"""Custom logit processors: requests name their classes, no mode of the plugin does."""

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


class BanByCalls(CustomLogitProcessor):
    """Bans another fifth at every call, counted in the parameters and on the request: one call per token."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or (), strict=True):
            request = params["__req__"]
            request.calls = getattr(request, "calls", 0) + 1
            params["calls"] = params.get("calls", 0) + 1
            row[(params["calls"] + request.calls) % 5 :: 5] = -torch.inf
        return logits
