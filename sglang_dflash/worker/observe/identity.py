"""What ``/server_info`` says of a worker that never changes: who serves, and the bytes that its pools take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang_dflash import __version__

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream import ModelRunner

# Inputs that a state replay (``--enable-linear-replayssm-spec``) keeps instead of a state per block position.
_REPLAYED = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_rawv", "replayssm_rawk", "replayssm_beta")


def identity(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> dict[str, object]:
    """Version, models and plan."""
    return {
        "version": __version__,
        "target": target.model_config.model_path,
        "drafter": drafter.model_config.model_path,
        "dtype": str(target.model_config.dtype).removeprefix("torch."),
        "draft_attention_backend": drafter.draft_attention_backend,
        **plan.describe(),
    }


def allocated_bytes(target: ModelRunner, drafter: ModelRunner) -> dict[str, int]:
    """The figures that ``sglang-dflash check`` estimates.

    ``states`` are committed recurrent states with their snapshots, ``scratch`` is what verification keeps of a block
    until one state is committed.
    """
    states, scratch = _recurrent(target.req_to_token_pool)
    return {
        "target_weights": _size(target.model.parameters()),
        "drafter_weights": _size(drafter.model.parameters()),
        "target_kv": int(sum(target.token_to_kv_pool.get_kv_size_bytes())),  # from numpy, which JSON lacks
        "draft_kv": int(sum(drafter.token_to_kv_pool.get_kv_size_bytes())),
        "states": states,
        "scratch": scratch,
    }


def _recurrent(request_pool: Any) -> tuple[int, int]:
    pool = getattr(request_pool, "mamba_pool", None)
    if pool is None:
        return 0, 0
    cache = pool.mamba_cache
    # The convolution's windows overlap in storage: their view is larger than what was allocated. A prefilling server of
    # a disaggregated pair has none.
    windows = getattr(pool, "_intermediate_conv_window_phys", None) or getattr(cache, "intermediate_conv_window", [])
    kept = [getattr(cache, name, None) for name in ("intermediate_ssm", *_REPLAYED)]
    return _size([*cache.conv, cache.temporal]), _size([*windows, *(tensor for tensor in kept if tensor is not None)])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)
