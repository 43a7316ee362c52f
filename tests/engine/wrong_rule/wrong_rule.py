"""An SGLang plugin that makes the acceptance rule wrong, for the test that must notice it.

The mistake is a common one: a rejected draft is replaced by a fresh draw from the same law, the rejected token not
excluded, so that drafts are too frequent. A server finds the plugin when this folder is on PYTHONPATH.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_dflash.worker.sampling.TargetSampler.choose", draw_twice, HookType.AROUND)


def draw_twice(
    original: Any, sampler: Any, batch: Any, logits_output: Any, draft_tokens: torch.Tensor, *rest: Any
) -> torch.Tensor:
    again = copy.copy(logits_output)
    again.next_token_logits = logits_output.next_token_logits.clone()
    first = original(sampler, batch, logits_output, draft_tokens, *rest)
    second = original(sampler, batch, again, draft_tokens, *rest)
    drafts = torch.cat((draft_tokens[:, 1:], first[:, -1:]), dim=1)
    return torch.where(first == drafts, first, second)
