"""Attention of a verify by rows, and a check of the target's products.

Hooks lay a block out as decode rows in SGLang's Triton backend. Under deterministic inference rows are independent, and
the split of a row's keys depends on its length alone. Each row is then bit-identical to plain decoding. A product is
not exact if its kernel depends on the number of rows.
"""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.features.exact.stepped import ALIGNMENT
from sglang_dflash.launch.plan import current
from sglang_dflash.launch.settings import EXACT_SWITCH
from sglang_dflash.upstream.hooks import Hooks

logger = logging.getLogger(__name__)


def widen(_: None, backend: Any, *args: Any, **options: Any) -> None:
    """Hook after ``TritonAttnBackend.__init__``: allocate a row per block position."""
    if not backend.is_draft_runner:
        rows = (len(backend.kv_indptr) - 1) * current.worker.plan.block
        backend.kv_indptr = backend.kv_indptr.new_zeros(rows + 1)


def prepare(original: Callable[..., None], backend: Any, forward_batch: Any, *args: Any, **options: Any) -> None:
    """Hook around both ``init_forward_metadata`` methods."""
    if _is_block(backend, forward_batch):
        width = backend._target_verify_num_tokens_per_req(forward_batch.spec_info)
        forward_batch = as_rows(forward_batch, width)
    original(backend, forward_batch, *args, **options)


def attend(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *save: bool, **options: Any
) -> Any:
    """Hook around ``forward_extend``: q, k and v already have a row per position."""
    if not _is_block(backend, forward_batch):
        return original(backend, q, k, v, layer, forward_batch, *save, **options)
    read = backend.forward_metadata
    for x in (q, read.attn_logits, read.attn_lse, read.kv_indptr, read.kv_indices, read.num_kv_splits):
        # Triton specialises kernels by address and by the stride of q, as in plain decoding
        assert x.data_ptr() % ALIGNMENT == q.stride(0) % 16 == 0, "plain decoding runs another compilation"
    return backend.forward_decode(q, k, v, layer, forward_batch, *save, **options)


def _is_block(backend: Any, forward_batch: Any) -> bool:
    return forward_batch.forward_mode.is_target_verify() and not backend.is_draft_runner


def as_rows(forward_batch: Any, width: int) -> Any:
    """Return SGLang's batch of blocks as a decode of ``width`` rows per request."""
    rows, bs = copy.copy(forward_batch), len(forward_batch.req_pool_indices)
    lens, total = forward_batch.seq_lens[:bs], forward_batch.seq_lens_sum
    after = torch.arange(1, width + 1, dtype=lens.dtype, device=lens.device)
    rows.forward_mode, rows.spec_info, rows.batch_size = ForwardMode.DECODE, None, bs * width
    rows.seq_lens = (lens[:, None] + after).flatten()
    rows.req_pool_indices = forward_batch.req_pool_indices.repeat_interleave(width)
    rows.seq_lens_sum = None if total is None else (total + bs * width) * width  # an upper bound
    return rows


_TRITON = "layers.attention.triton_backend.TritonAttnBackend"
HOOKS = Hooks(
    around={
        f"{_TRITON}.init_forward_metadata": prepare,
        f"{_TRITON}.init_forward_metadata_out_graph": prepare,
        f"{_TRITON}.forward_extend": attend,
    },
    after={f"{_TRITON}.__init__": widen},
)


def is_exact(target: Any, widths: tuple[int, ...]) -> bool | str:
    """Return, and log, whether this device computes all products of a model runner exactly, or why not."""
    if found := row_dependent_products(target, widths):
        reason = f"products depend on the number of rows: {', '.join(map(str, found))}"
        logger.warning("DFLASH: a verify is not exact, so text may differ at near-ties: %s", reason)
        return reason
    logger.info("DFLASH: greedy output is bit-identical to plain decoding (%s=0 disables it)", EXACT_SWITCH)
    return True


@torch.no_grad()
def row_dependent_products(target: Any, widths: tuple[int, ...], compared: int = 256) -> list[Any]:
    """Return the products of a model runner whose rows depend on the number of rows, by shape ``(outputs, inputs)``.

    Compare the bits of the first ``compared`` rows of one projection per shape, of experts and of the LM head with
    those of each row alone. Where oneDNN sums in another order, one row in forty differs.
    """
    model, most, hidden = target.model, target.max_running_requests, target.model_config.hidden_size
    processor = next(module for module in model.modules() if isinstance(module, LogitsProcessor))
    products: Any = {("LM head", hidden): partial(processor._compute_lm_head, lm_head=model.lm_head)}
    for module in getattr(model, "model", model).modules():  # without a vision tower
        # a convolution's weight has three dimensions
        if isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod) and module.weight.dim() == 2:
            products[tuple(module.weight.shape)] = partial(module.quant_method.apply, module, bias=module.bias)
        elif hasattr(module, "experts"):
            products["experts", hidden] = module
    found, counts = [], sorted({bs * width for bs in range(1, most + 1) for width in (1, *widths)})
    for shape, product in products.items():
        rows = torch.arange(counts[-1] * shape[1], device=target.device).sin().to(target.dtype).view(-1, shape[1])
        # some experts write to their input
        alone = torch.cat([product(row) for row in rows[:compared].clone().split(1)])
        if not all(torch.equal(product(rows[:count].clone())[:compared], alone[:count]) for count in counts):
            found.append(shape)
    return found
