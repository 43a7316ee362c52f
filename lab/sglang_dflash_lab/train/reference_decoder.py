"""DFLASH chain decoding in plain PyTorch and transformers: the reference of the engine tests.

It decodes one request without batching or paging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_dflash_lab.train.drafter import Drafter, KeyValue, context_features, visible
from sglang_dflash_lab.train.hf import load_model, transformers
from sglang_dflash_lab.train.sampling import Sampling

RecurrentState = dict[int, tuple[Tensor, Tensor]]  # layer -> convolution state, recurrent state


class TargetRun:
    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.cache = transformers.DynamicCache(config=model.config)
        self.length = 0

    @torch.no_grad()
    def append(self, tokens: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits fp32 [n, vocabulary] and transformers' tuple of hidden states, each [1, n, hidden]."""
        device = self.model.device
        out = self.model.model(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=torch.arange(self.length, self.length + len(tokens), device=device)[None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        self.length += len(tokens)
        return self.model.lm_head(out.last_hidden_state)[0].float(), out.hidden_states

    def recurrent_state(self) -> RecurrentState:
        """Copy the state of every linear-attention layer; empty for a dense target."""
        return {
            i: (layer.conv_states[0].clone(), layer.recurrent_states[0].clone())
            for i, layer in enumerate(self.cache.layers)
            if hasattr(layer, "recurrent_states")
        }

    def restore(self, state: RecurrentState) -> None:
        for i, (convolution, recurrent) in state.items():
            self.cache.layers[i].conv_states[0].copy_(convolution)
            self.cache.layers[i].recurrent_states[0].copy_(recurrent)

    def rewind(self, length: int, state: RecurrentState) -> None:
        """Return to ``length`` tokens with recurrent state ``state``, which ``Cache.crop`` cannot restore."""
        for i, layer in enumerate(self.cache.layers):
            if i not in state and length < self.length:
                layer.crop(length - self.length)
        self.restore(state)
        self.length = length


class DrafterRun:
    input_scale = 1.0  # of the block's embeddings; tests set it

    def __init__(
        self, drafter: Drafter, target: transformers.PreTrainedModel, draft_window: int | None, page: int = 1
    ) -> None:
        self.drafter, self.target, self.draft_window, self.page = drafter, target, draft_window, page
        self.length = 0
        self.context: list[KeyValue] = []

    @torch.no_grad()
    def inject(self, hidden_states: tuple[Tensor, ...], n: int) -> None:
        """Append the context of the first ``n`` newly committed positions."""
        features = context_features(hidden_states, self.drafter.config.target_layer_ids)[:, :n]
        positions = torch.arange(self.length, self.length + n, device=features.device)[None]
        new = self.drafter.context_key_values(features, positions)
        old = self.context or [(k[:, :, :0], v[:, :, :0]) for k, v in new]
        self.context = [
            (torch.cat((k, new_k), dim=2), torch.cat((v, new_v), dim=2))
            for (k, v), (new_k, new_v) in zip(old, new, strict=True)
        ]
        self.length += n

    @torch.no_grad()
    def block_hidden(self, anchor: int, width: int) -> Tensor:
        """Return hidden states [width, hidden] of the block of ``anchor`` and masks."""
        c, device = self.drafter.config, self.target.device
        tokens = torch.tensor([[anchor] + [c.mask_token_id] * (width - 1)], device=device)
        positions = torch.arange(self.length, self.length + width, device=device)
        keys = torch.arange(self.length + width, device=device)
        start = torch.tensor(self.length, device=device)
        window = self.draft_window
        if window is not None:
            window += (self.length - window) % self.page
        masks = [
            visible(layer_type, positions[:, None], keys, start, c.sliding_window, window)[None, None]
            for layer_type in c.layer_types
        ]
        embeds = self.target.model.embed_tokens(tokens) * self.input_scale
        return self.drafter(embeds, positions[None], self.context, masks, width)[0]

    @torch.no_grad()
    def propose(self, anchor: int, width: int, sampling: Sampling | None = None) -> tuple[list[int], Tensor]:
        """Return a draft per position after ``anchor``, width - 1 of them, and its lead over the second choice."""
        if width == 1:
            return [], torch.empty(0, device=self.target.device)
        hidden = self.block_hidden(anchor, width)[None, 1:]
        anchors = torch.tensor([anchor], device=hidden.device)

        def with_noise(i: int, ids: Tensor, scores: Tensor) -> Tensor:
            assert sampling is not None
            chosen = sampling.draft(scores[0].double().numpy(), ids[0].numpy(), self.length + i)
            return torch.tensor([[chosen]])

        pick = None if sampling is None else with_noise
        tokens, leads = self.drafter.choose(anchors, hidden, self.target.lm_head(hidden), pick)
        return tokens[0].tolist(), leads[0]

    def draft(self, anchor: int, width: int) -> list[int]:
        return self.propose(anchor, width)[0]


@dataclass(frozen=True)
class Step:
    """One draft-and-verify step.

    Attributes:
        drafted: the drafts, width - 1 of them.
        accept_length: accepted drafts plus the bonus token, not cut at the end token.
        lead: smallest lead of a best token over the second, in logits, among the choices of the accept length.
    """

    drafted: tuple[int, ...]
    accept_length: int
    lead: float


@dataclass(frozen=True)
class Decoded:
    """Output tokens up to and including the end token, and the steps that made all but the first."""

    tokens: list[int]
    steps: list[Step]

    @property
    def accept_lengths(self) -> list[int]:
        return [step.accept_length for step in self.steps]


class ReferenceDecoder:
    def __init__(self, target: transformers.PreTrainedModel, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self.eos = target.config.eos_token_id

    @classmethod
    def load(
        cls, target: Path, drafter: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> ReferenceDecoder:
        return cls(load_model(target, dtype, device), Drafter.load(drafter, dtype).to(device))

    def plain(self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling | None = None) -> list[int]:
        """Return the target's own output, greedy or sampled, with the end token."""
        run = TargetRun(self.target)
        tokens = _chosen(run.append(prompt)[0][-1:], len(prompt) - 1, sampling)
        while tokens[-1] != self.eos and len(tokens) < max_new_tokens:
            tokens += _chosen(run.append(tokens[-1:])[0], run.length - 1, sampling)
        return tokens

    def decode(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        width: int = 16,
        draft_window: int | None = None,
        page: int = 1,
        sampling: Sampling | None = None,
    ) -> Decoded:
        """Decode one prompt with chain drafting, greedy or sampled.

        Args:
            width: positions verified per step including the anchor, 1 .. block size.
            draft_window: context positions that full-attention layers of the drafter read; None for all.
            page: the window begins at a multiple of this, up to ``page`` - 1 positions earlier.
        """
        target = TargetRun(self.target)
        drafter = DrafterRun(self.drafter, self.target, draft_window, page)
        logits, hidden = target.append(prompt)
        drafter.inject(hidden, len(prompt))
        tokens = _chosen(logits[-1:], len(prompt) - 1, sampling)
        steps: list[Step] = []
        while self.eos not in tokens and len(tokens) < max_new_tokens:
            anchor, length, state = tokens[-1], target.length, target.recurrent_state()
            drafted, leads = drafter.propose(anchor, width, sampling)
            block = [anchor, *drafted]
            logits, hidden = target.append(block)
            best = _chosen(logits, length, sampling)
            agreeing = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
            new = best[: agreeing + 1]  # accepted drafts and the bonus token
            if len(new) < len(block):
                target.rewind(length, state)
                target.append(block[: len(new)])
            drafter.inject(hidden, len(new))
            tokens += new
            first, second = logits[: len(new)].topk(2).values.unbind(-1)
            steps.append(Step(tuple(drafted), len(new), float(torch.cat((first - second, leads[: len(new)])).min())))
        end = tokens.index(self.eos) + 1 if self.eos in tokens else len(tokens)
        return Decoded(tokens[: min(end, max_new_tokens)], steps)


def _chosen(logits: Tensor, position: int, sampling: Sampling | None) -> list[int]:
    """Return the target's token of each row of ``logits``, which follow the positions from ``position`` on."""
    if sampling is None:
        return logits.argmax(-1).tolist()
    rows, tokens = logits.double().numpy(), np.arange(logits.shape[-1])
    return [sampling.draw(row, tokens, position + i) for i, row in enumerate(rows)]
