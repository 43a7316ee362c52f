"""DFlash2's convolution over the positions of a block, around a sublayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.ops import convolve_block
from sglang_dflash.upstream.worker import ReplicatedLinear


class BlockConvolution(nn.Module):
    """Convolve what goes into a sublayer and what comes out of it.

    Both kernels are a channel's own coefficients plus corrections, which a position computes from the sublayer's input
    for groups of channels. The context's K and V are not convolved. Every tensor-parallel rank holds all of it.
    """

    def __init__(self, config: DrafterConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, taps = config.hidden_size, config.conv_taps
        self._kernels = 2, taps, hidden // config.conv_group  # before and after, taps, groups
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden), requires_grad=False)
        self.kernel_projection = ReplicatedLinear(
            hidden,
            2 * taps * self._kernels[2],
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.kernel_projection",
        )

    def forward(self, hidden: Tensor, width: int, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolved ``sublayer`` of ``hidden`` [bs * w, H], in blocks of ``width`` positions.

        The width is the step's: at another width a position would read a neighbour of another request.
        """
        before, after = self.kernel_projection(hidden)[0].unflatten(1, self._kernels).unbind(1)
        hidden = convolve_block(hidden, self.base_kernel[0], before, width=width)
        return convolve_block(sublayer(hidden), self.base_kernel[1], after, width=width)
