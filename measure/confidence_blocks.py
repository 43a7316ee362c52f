"""What a drafter says of its drafts and what becomes of them, at every position of the target's own text.

Drafts depend on the text so far and not on how it was cut into steps. So the blocks at all positions are enough to walk
through the text at any width, with any cut, exactly as a server would; rounding aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.bench.tasks.question import Question
from sglang_dflash.train.drafter import Drafter, context_features, visible
from sglang_dflash.train.hf import transformers

BLOCK = 16
TEMPERATURES = (1.0, 0.7, 0.85, 1.2, 1.5, 2.0, 3.0)
_AT_ONCE = 32


@dataclass(frozen=True)
class Blocks:
    """Blocks of one text, or of several one after the other; n of them, one per anchor.

    Attributes:
        confidence: float32 [n, 15, T], the drafter's probability of each draft, its logits divided by each of
            ``TEMPERATURES``.
        right: bool [n, 15], whether the draft is the text's token there.
        known: bool [n, 15], whether the text goes that far.
    """

    confidence: Tensor
    right: Tensor
    known: Tensor

    @classmethod
    def joined(cls, texts: Sequence[Blocks]) -> Blocks:
        return cls(*(torch.cat([getattr(text, name) for text in texts]) for name in cls.__dataclass_fields__))

    @property
    def survived(self) -> Tensor:
        """Whether every draft up to this one is right, bool [n, 15]."""
        return self.right.cumprod(1).bool()

    @property
    def at_risk(self) -> Tensor:
        """Whether every draft before this one is right and the text goes as far as this one, bool [n, 15]."""
        before = torch.cat((torch.ones_like(self.right[:, :1]), self.survived[:, :-1]), dim=1)
        return before & self.known


def encode(tokenizer: transformers.PreTrainedTokenizerFast, question: Question) -> list[int]:
    return tokenizer.apply_chat_template(list(question.messages), add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def answers(
    target: transformers.PreTrainedModel, prompts: Sequence[list[int]], temperature: float, new_tokens: int
) -> list[list[int]]:
    """The target's continuation of each prompt, up to and including the end token; temperature 0 is greedy."""
    torch.manual_seed(0)
    eos, pad = target.config.eos_token_id, target.config.pad_token_id
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), _AT_ONCE):
        rows = order[first : first + _AT_ONCE]
        width = len(prompts[rows[-1]])
        padding = [width - len(prompts[i]) for i in rows]
        out = target.generate(
            torch.tensor([[pad] * n + prompts[i] for i, n in zip(rows, padding, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in padding]),
            max_new_tokens=new_tokens,
            eos_token_id=eos,
            pad_token_id=pad,
            **how,
        )
        for i, tokens in zip(rows, out[:, width:].tolist(), strict=True):
            texts[i] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return texts


@torch.no_grad()
def blocks(
    target: transformers.PreTrainedModel, drafters: Sequence[Drafter], prompt: list[int], answer: list[int]
) -> list[Blocks]:
    """One per drafter: a full block at every token of the answer but the last."""
    tokens = torch.tensor(prompt + answer)
    hidden = target.model(input_ids=tokens[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    anchors = torch.arange(len(prompt), len(tokens) - 1)
    places = anchors[:, None] + torch.arange(1, BLOCK)
    known = places < len(tokens)
    truth = tokens[places.clamp(max=len(tokens) - 1)]
    found = []
    for drafter in drafters:
        parts = [_draft(target, drafter, hidden, tokens, part) for part in anchors.split(_AT_ONCE)]
        drafts, confidence = (torch.cat(part) for part in zip(*parts, strict=True))
        found.append(Blocks(confidence, (drafts == truth) & known, known))
    return found


def _draft(
    target: transformers.PreTrainedModel, drafter: Drafter, hidden: tuple[Tensor, ...], tokens: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Drafts [n, 15] and their probabilities [n, 15, T] after the tokens at ``anchors`` [n], all blocks in one pass.

    The keys are the longest context, of which a block sees what lies before its anchor, and the block's own.
    """
    c, n, end = drafter.config, len(anchors), int(anchors[-1])
    features = context_features(hidden, c.target_layer_ids)[:, :end]
    context = [
        (keys.expand(n, -1, -1, -1), values.expand(n, -1, -1, -1))
        for keys, values in drafter.context_key_values(features, torch.arange(end)[None])
    ]
    block = torch.full((n, BLOCK), c.mask_token_id)
    block[:, 0] = tokens[anchors]
    positions = anchors[:, None] + torch.arange(BLOCK)
    before = torch.arange(end).expand(n, -1)
    keys = torch.cat((before, positions), dim=1)[:, None, :]
    real = torch.cat((before < anchors[:, None], torch.ones_like(block, dtype=torch.bool)), dim=1)[:, None, :]
    masks = [
        (real & visible(kind, positions[:, :, None], keys, anchors[:, None, None], c.sliding_window))[:, None]
        for kind in c.layer_types
    ]
    out = drafter(target.model.embed_tokens(block), positions, context, masks)[:, 1:]
    logits = target.lm_head(out).float()
    best, drafts = logits.max(-1)
    confidence = [(best / t - (logits / t).logsumexp(-1)).exp() for t in TEMPERATURES]
    return drafts, torch.stack(confidence, dim=-1)
