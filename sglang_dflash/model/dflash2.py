"""DFlash2's additions: a convolution over the positions of a block, and a candidate selector."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.ops import Noise, convolve_block, walk_candidates


class BlockConvolution(nn.Module):
    """Convolve the input and the output of a sublayer with per-channel coefficients plus corrections, which each
    position computes for groups of channels."""

    def __init__(self, config: DrafterConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, taps = config.hidden_size, config.conv_taps
        self._kernels = 2, taps, hidden // config.conv_group  # before and after, taps, groups
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden), requires_grad=False)
        coefficients, name = 2 * taps * self._kernels[2], f"{prefix}.kernel_projection"
        self.kernel_projection = ReplicatedLinear(hidden, coefficients, False, quant_config=quant_config, prefix=name)

    def forward(self, hidden: Tensor, width: int, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolved ``sublayer`` of ``hidden`` [bs * w, H], in blocks of ``width`` positions."""
        before, after = self.kernel_projection(hidden)[0].unflatten(1, self._kernels).unbind(1)
        hidden = convolve_block(hidden, self.base_kernel[0], before, width=width)
        return convolve_block(sublayer(hidden), self.base_kernel[1], after, width=width)


class CandidateSelector(nn.Module):
    """DFlash2: the K largest logits of each position, rescored by :func:`walk_candidates`."""

    def __init__(self, config: DrafterConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        codebook = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(codebook), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(codebook), requires_grad=False)
        sizes, name = (config.hidden_size, config.selector_rank), f"{prefix}.hidden_projection"
        self.hidden_projection = ReplicatedLinear(*sizes, False, quant_config=quant_config, prefix=name)
        self._top_k = config.selector_top_k

    def forward(
        self, vocabulary: TargetVocabulary, anchors: Tensor, hidden: Tensor, positions: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`TargetVocabulary.likeliest`."""
        rows, shape = hidden.flatten(0, 1), (*hidden.shape[:2], -1)
        unary, candidates = vocabulary.top_k(rows, self._top_k)
        candidates, unary, gates = (x.view(shape) for x in (candidates, unary, self.hidden_projection(rows)[0]))
        codebooks = gates, self.predecessor_codebook, self.successor_codebook
        return walk_candidates(candidates, unary, anchors, positions, noise, codebooks)
