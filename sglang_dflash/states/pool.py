"""SGLang's pools of recurrent states: hooks that build them for a replay, and the kept states of a narrower block.

SGLang refuses ``--enable-linear-replayssm-spec`` for DFLASH on GDN targets because its own DFLASH worker commits in a
way that a replay does not know. Ours commits in the way that it does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_dflash.plan import serving
from sglang_dflash.upstream import get_exec, get_schedule, get_spec


def build_pool(original: Callable[..., Any], configurator: Any, **sizes: Any) -> Any:
    """Hook around ``KVCacheConfigurator._build_hybrid_req_pool``, which allows a replay for KDA models only.

    Nothing else in that method depends on the KDA configuration alone.
    """
    if serving.plan is not None and configurator.hybrid_kda_config is None:
        configurator = copy.copy(configurator)
        configurator.hybrid_kda_config = configurator.hybrid_gdn_config
    return original(configurator, **sizes)


def charge_windows(original: Callable[..., Any], configurator: Any, total_rest_memory: float) -> Any:
    """Hook around ``KVCacheConfigurator._handle_max_mamba_cache``, which omits a replay's convolution windows.

    Args:
        total_rest_memory: GiB left for recurrent states and K/V.
    """
    if serving.plan is not None and get_exec().mamba.enable_linear_replayssm_spec:
        params = configurator.mambaish_config.mamba2_cache_params
        block = get_spec().speculative_num_draft_tokens
        window = sum(math.prod(shape) // min(shape) * (min(shape) + block - 1) for shape in params.shape.conv)
        rows = get_schedule().max_running_requests + 1
        total_rest_memory -= rows * window * params.dtype.conv.itemsize * len(params.layers) / (1 << 30)
    return original(configurator, total_rest_memory)


def packed(cache: Any, width: int) -> Any:
    """SGLang's ``SpeculativeState`` with ``width`` positions per request, in the same memory.

    FlashInfer's verify kernels write the state of request i after position t to entry ``i * width + t``. SGLang's
    Triton kernel writes by the tensor's strides, and the commit reads by them. All agree on a tensor of this width.

    Args:
        cache: its ``intermediate_ssm`` is ``[layers, rows, block, HV, V, K]``, contiguous, block >= width; the result's
            is ``[layers, rows * block // width, width, HV, V, K]``. Convolution windows are written and read by strides
            and stay as they are.
    """
    states = cache.intermediate_ssm
    layers, rows, block = states.shape[:3]
    rows = rows * block // width
    view = states.flatten(0, 2)[: layers * rows * width].unflatten(0, (layers, rows, width))
    return replace(cache, intermediate_ssm=view)
