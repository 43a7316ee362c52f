"""An SGLang plugin that makes the acceptance rule wrong, for the test that must notice it.

A server finds the plugin when this folder is on PYTHONPATH; the variable WRONG_RULE names the mistake.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHOOSE = "sglang_dflash.worker.sampling.sampler.TargetSampler.choose"
LIKELY = 0.3


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        CHOOSE, {"draw_twice": draw_twice, "keep_likely": keep_likely}[os.environ["WRONG_RULE"]], HookType.AROUND
    )


def draw_twice(
    original: Callable[..., Tensor], sampler: Any, batch: Any, logits_output: Any, draft_tokens: Tensor, *rest: Any
) -> Tensor:
    """A rejected draft is replaced by a fresh draw from the same law, the rejected token not excluded."""
    again = copy.copy(logits_output)
    again.next_token_logits = logits_output.next_token_logits.clone()
    first = original(sampler, batch, logits_output, draft_tokens, *rest)
    second = original(sampler, batch, again, draft_tokens, *rest)
    drafts = torch.cat((draft_tokens[:, 1:], first[:, -1:]), dim=1)
    return torch.where(first == drafts, first, second)


def keep_likely(
    original: Callable[..., Tensor], sampler: Any, batch: Any, logits_output: Any, draft_tokens: Tensor, *rest: Any
) -> Tensor:
    """A draft is kept whenever the target, with the request's bias and temperature, gives it some probability."""
    bs, width = draft_tokens.shape
    info = batch.sampling_info
    logits = logits_output.next_token_logits.view(bs, width, -1)[:, :-1]
    if info.logit_bias is not None:
        logits = logits + info.logit_bias[:, None]
    drafts = draft_tokens[:, 1:]
    probs = torch.softmax(logits / info.temperatures[:, None], dim=-1)
    likely = probs.gather(2, drafts[..., None])[..., 0] > LIKELY
    tokens = original(sampler, batch, logits_output, draft_tokens, *rest)
    tokens[:, :-1] = torch.where(likely, drafts, tokens[:, :-1])
    return tokens
