"""The last part of a draft: from hidden states of a block to its tokens.

A head takes vocabulary, anchors int64 [bs] and hidden states of the mask positions [bs, n, H]. It returns one token per
mask, int64 [bs, n], and with ``margins`` the lead of each over the second choice, float32 [bs, n].
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.ops import walk_candidates
from sglang_dflash.upstream.worker import ReplicatedLinear

logger = logging.getLogger(__name__)
Drafts = tuple[Tensor, Tensor | None]


def most_probable(vocabulary: TargetVocabulary, anchors: Tensor, hidden: Tensor, *, margins: bool) -> Drafts:
    """Plain DFlash: the token of the largest logit, at each position independently."""
    tokens, leads = vocabulary.argmax_token(hidden.flatten(0, 1), margins=margins)
    shape = hidden.shape[:2]
    return tokens.view(shape), None if leads is None else leads.view(shape)


class CandidateSelector(nn.Module):
    """DFlash2: the K largest logits of each position, rescored by the token chosen before (:func:`walk_candidates`).

    Leads are differences of scores, which are log-odds as logits are. Every tensor-parallel rank holds all of it.
    """

    def __init__(self, config: DrafterConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        codebook = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(codebook), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(codebook), requires_grad=False)
        self.hidden_projection = ReplicatedLinear(
            config.hidden_size,
            config.selector_rank,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.hidden_projection",
        )
        self._top_k, self._cap = config.selector_top_k, config.logit_cap
        if self.predecessor_codebook.is_cuda and find_spec("flashinfer") is None:
            logger.warning(
                "DFLASH: FlashInfer is not installed; torch selects the candidates, which takes longer with a large "
                "vocabulary. Fix: install flashinfer-python"
            )

    def forward(self, vocabulary: TargetVocabulary, anchors: Tensor, hidden: Tensor, *, margins: bool) -> Drafts:
        rows, shape = hidden.flatten(0, 1), (*hidden.shape[:2], -1)
        unary, candidates = vocabulary.top_k(rows, self._top_k)
        if self._cap is not None:
            unary = self._cap * torch.tanh(unary / self._cap)
        gates, _ = self.hidden_projection(rows)
        tokens, leads = walk_candidates(
            candidates.view(shape),
            unary.view(shape),
            gates.view(shape),
            anchors,
            self.predecessor_codebook,
            self.successor_codebook,
        )
        return tokens, leads if margins else None
