"""Compare, in exact mode, the target's products on one row with those on the same row among others.

Plain decoding multiplies one row per request, a verify one per position of every block. SGLang's deterministic mode
chooses kernels by the number of rows. Where one sums in another order, a verify is not plain decoding bit by bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sglang_dflash.upstream.worker import LogitsProcessor, UnquantizedLinearMethod


@torch.no_grad()
def row_dependent_products(target: Any, width: int, compared: int = 256) -> list[Any]:
    """Return the products of a model runner whose rows depend on the number of rows, by shape ``(outputs, inputs)``.

    Run one projection of each shape, a block of experts and the LM head on as many rows as a plain decode and a verify
    of ``width`` positions have, for every batch size. Compare the bits of the first ``compared`` rows with those of
    each row alone: where oneDNN sums in another order, one row in forty shows it.
    """
    model, most, hidden = target.model, target.max_running_requests, target.model_config.hidden_size
    processor = next(module for module in model.modules() if isinstance(module, LogitsProcessor))
    products: Any = {("LM head", hidden): partial(processor._compute_lm_head, lm_head=model.lm_head)}
    for module in getattr(model, "model", model).modules():  # without a vision tower
        # A convolution's weight, of three dimensions, is in such a layer too.
        if isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod) and module.weight.dim() == 2:
            products[tuple(module.weight.shape)] = partial(module.quant_method.apply, module, bias=module.bias)
        elif hasattr(module, "experts"):
            products["experts", hidden] = module
    found, counts = [], [*range(1, most + 1), *range(width, most * width + 1, width)]
    for shape, product in products.items():
        rows = torch.arange(most * width * shape[1], device=target.device).sin().to(target.dtype).view(-1, shape[1])
        # Some experts write to their input.
        alone = torch.cat([product(row) for row in rows[:compared].clone().split(1)])
        if not all(torch.equal(product(rows[:count].clone())[:compared], alone[:count]) for count in counts):
            found.append(shape)
    return found
