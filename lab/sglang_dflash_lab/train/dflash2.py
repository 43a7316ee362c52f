"""DFlash2's parts of a drafter: a convolution around each sublayer, and a selector of the drafts.

Parameter names are the published checkpoints'. Shapes: ``T`` taps, ``K`` candidates, codebooks of rank ``R``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from sglang_dflash_lab.train.drafter import DrafterConfig


class BlockConvolution(nn.Module):
    """Convolve the input and the output of a sublayer backwards over a block's positions.

    A tap's weight is the channel's own plus a correction, computed per position and channel group from the input.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.shape = 2, c.conv_kernel_size, c.hidden_size // c.conv_group_size  # before and after, taps, groups
        self.base_kernel = nn.Parameter(torch.zeros(2, c.conv_kernel_size, c.hidden_size))
        self.kernel_projection = nn.Linear(c.hidden_size, 2 * c.conv_kernel_size * self.shape[2], bias=False)
        with torch.no_grad():  # identity
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def forward(self, x: Tensor, width: int, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sublayer's output for x [rows, blocks * width, hidden]."""
        corrections = self.kernel_projection(x).unflatten(-1, self.shape)
        x = _convolve(x, self.base_kernel[0], corrections[..., 0, :, :], width)
        return _convolve(sublayer(x), self.base_kernel[1], corrections[..., 1, :, :], width)


def _convolve(x: Tensor, base: Tensor, corrections: Tensor, width: int) -> Tensor:
    taps, groups = corrections.shape[-2:]
    kernel = base + corrections.repeat_interleave(x.shape[-1] // groups, dim=-1)  # [rows, n, T, hidden]
    blocks = x.unflatten(1, (-1, width))
    earlier = [F.pad(blocks, (0, 0, tap, 0))[:, :, :width].flatten(1, 2) for tap in range(taps)]
    return (kernel * torch.stack(earlier, dim=2)).sum(2)


# Of a mask's number, candidates and scores [rows, K]: the index of the chosen one, [rows, 1].
Pick = Callable[[int, Tensor, Tensor], Tensor]


class Selector(nn.Module):
    """Score candidates by the preceding token: ``S(p, c) = U(c) + <A[p] * (W h), B[c]>``.

    U: scaled and softly capped logits; A, B: codebooks of predecessors and successors.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.top_k, self.multiplier, self.cap = c.selector_top_k, c.output_multiplier, c.final_logit_softcapping
        self.predecessor_codebook = nn.Parameter(torch.randn(c.vocab_size, c.selector_rank))
        # Zero: training starts from the logits alone. With both codebooks zero, neither has a gradient.
        self.successor_codebook = nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank))
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)

    def unary(self, logits: Tensor) -> Tensor:
        logits = logits.float() * self.multiplier
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def scores(self, hidden: Tensor, before: Tensor, candidates: Tensor, unary: Tensor) -> Tensor:
        """Return scores [..., K] of ``candidates`` with logits ``unary`` [..., K] after tokens ``before`` [...]."""
        key = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return unary + (self.successor_codebook[candidates] @ key[..., None]).squeeze(-1)

    def walk(self, anchors: Tensor, hidden: Tensor, logits: Tensor, pick: Pick | None = None) -> tuple[Tensor, Tensor]:
        """Choose the best candidate given the previous choice, from left to right.

        Args:
            anchors: int64 [rows].
            hidden, logits: of the n masks, [rows, n, ...].
            pick: chooses in place of the best.

        Returns:
            Tokens int64 [rows, n], and leads over the second best candidates, float [rows, n].
        """
        unary, candidates = self.unary(logits).topk(self.top_k)
        tokens, leads = [anchors], []
        for i in range(hidden.shape[1]):
            scores = self.scores(hidden[:, i].float(), tokens[-1], candidates[:, i], unary[:, i])
            (first, second), best = scores.topk(2).values.unbind(-1), scores.argmax(-1, keepdim=True)
            if pick is not None:
                best = pick(i, candidates[:, i], scores)
            tokens.append(candidates[:, i].gather(1, best).squeeze(1))
            leads.append(first - second)
        return torch.stack(tokens[1:], dim=1), torch.stack(leads, dim=1)

    def losses(self, hidden: Tensor, logits: Tensor, before: Tensor, labels: Tensor) -> Tensor:
        """Return cross-entropy [n] over the candidates after the true token, with the label always among them."""
        candidates = logits.topk(self.top_k).indices
        absent = (candidates != labels[:, None]).all(-1)
        candidates[:, -1] = torch.where(absent, labels, candidates[:, -1])
        scores = self.scores(hidden.float(), before, candidates, self.unary(logits.gather(1, candidates)))
        return F.cross_entropy(scores, (candidates == labels[:, None]).int().argmax(-1), reduction="none")
