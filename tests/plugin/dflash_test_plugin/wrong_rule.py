"""Modes ``draw_twice`` and ``keep_likely``: a wrong acceptance rule, for the tests that must notice it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIKELY = 0.3


def draw_twice(original: Callable[..., Tensor], accept: Any, step: Any) -> Tensor:
    """A rejected draft is replaced by a fresh draw from the same law, the rejected token not excluded."""
    again, step_again = copy.copy(step.verified.logits_output), copy.copy(step)
    again.next_token_logits = again.next_token_logits.clone()
    step_again.verified = dataclasses.replace(step.verified, logits_output=again)
    first = original(accept, step)
    second = original(accept, step_again)
    drafts = torch.cat((step.tokens[:, 1:], first[:, -1:]), dim=1)
    return torch.where(first == drafts, first, second)


def keep_likely(original: Callable[..., Tensor], accept: Any, step: Any) -> Tensor:
    """A draft is kept whenever the target, with the request's bias and temperature, gives it some probability."""
    info, drafts = step.batch.sampling_info, step.tokens[:, 1:]
    rows = step.verified.logits_output.next_token_logits
    logits = rows.view(-1, step.width, rows.shape[-1])[:, :-1]
    if info.logit_bias is not None:
        logits = logits + info.logit_bias[:, None]
    probs = torch.softmax(logits / info.temperatures[:, None], dim=-1)
    likely = probs.gather(2, drafts[..., None])[..., 0] > LIKELY
    tokens = original(accept, step)
    tokens[:, :-1] = torch.where(likely, drafts, tokens[:, :-1])
    return tokens
