"""The constant part of a worker's ``/server_info``: version, models, plan, and the bytes of its pools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang_dflash import __version__

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream import ModelRunner

# With ``--enable-linear-replayssm-spec``, SGLang keeps these inputs instead of a state per block position.
_REPLAYED = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_rawv", "replayssm_rawk", "replayssm_beta")


def identity(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> dict[str, object]:
    """Return version, models and plan."""
    return {
        "version": __version__,
        "target": target.model_config.model_path,
        "drafter": drafter.model_config.model_path,
        "dtype": str(target.model_config.dtype).removeprefix("torch."),
        "draft_attention_backend": drafter.draft_attention_backend,
        **plan.describe(),
    }


def allocated_bytes(target: ModelRunner, drafter: ModelRunner) -> dict[str, int]:
    """Return the allocated bytes by the names of ``sglang-dflash check``.

    ``states`` are committed recurrent states and snapshots. ``scratch`` holds a block's states during verification.
    """
    states, scratch = _recurrent(target.req_to_token_pool)
    return {
        "target_weights": _size(target.model.parameters()),
        "drafter_weights": _size(drafter.model.parameters()),
        "target_kv": int(sum(target.token_to_kv_pool.get_kv_size_bytes())),  # a numpy integer is not JSON
        "draft_kv": int(sum(drafter.token_to_kv_pool.get_kv_size_bytes())),
        "states": states,
        "scratch": scratch,
    }


def _recurrent(request_pool: Any) -> tuple[int, int]:
    pool = getattr(request_pool, "mamba_pool", None)
    if pool is None:
        return 0, 0
    cache = pool.mamba_cache
    # Convolution windows overlap in storage, so their view is larger than the allocation. A prefill server has none.
    windows = getattr(pool, "_intermediate_conv_window_phys", None) or getattr(cache, "intermediate_conv_window", [])
    kept = [getattr(cache, name, None) for name in ("intermediate_ssm", *_REPLAYED)]
    return _size([*cache.conv, cache.temporal]), _size([*windows, *(tensor for tensor in kept if tensor is not None)])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)
