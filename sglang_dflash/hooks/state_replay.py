"""One recurrent state per request: SGLang's replay of what draft tokens write, for GDN targets under our worker.

A verify needs to return to the state after any of its tokens. SGLang keeps all of these states, or with
``--enable-linear-replayssm-spec`` what each token writes, and refuses that for DFLASH on GDN, because its own worker
commits on a road that a replay does not know. Ours takes the road that does. So the refusal is lifted for it, and the
replay is switched on where it pays, which for a published pair is everywhere.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash.check.preflight import preflight
from sglang_dflash.check.replay import FLAG, SWITCH, asked_for, length, reason_against
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.drafter.served import our_worker_serves
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import UNKNOWN_GPU, find_gpu
from sglang_dflash.upstream import (
    declare_resolution,
    get_exec,
    get_schedule,
    get_spec,
    hybrid_gdn_config,
    model_config_of,
    resolving_view,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs

logger = logging.getLogger(__name__)


def choose(server_args: ServerArgs) -> None:
    """After SGLang resolved speculation, for a server of ours: replay or a state per token, with one log line.

    Raises:
        DFlashError: the user asked for a replay that cannot be served, or would give wrong tokens.
    """
    args = resolving_view(server_args)
    if hybrid_gdn_config(model_config_of(server_args)) is None:
        return
    memory = None if on_our_cpu_platform() else preflight(args, find_gpu() or UNKNOWN_GPU).memory
    against, replay = reason_against(args), asked_for(args)
    if replay is None:
        replay = against is None if on_our_cpu_platform() else memory is not None and memory.replay
    if not replay:
        logger.info("DFLASH: a recurrent state is kept for each draft token")
        return
    if against:
        raise DFlashError(
            against, expected=f"a server that can replay states ({FLAG})", remedy=f"leave {FLAG} and {SWITCH} out"
        )
    declared: dict[str, Any] = {} if memory is None else {"mamba_full_memory_ratio": memory.demand.state_share}
    declare_resolution(
        server_args,
        "sglang_dflash.state_replay",
        enable_linear_replayssm_spec=True,
        linear_replayssm_cache_len=length(args, args.speculative_num_draft_tokens),
        **declared,
    )
    logger.info("DFLASH: recurrent states are replayed from what draft tokens write (%s=0 keeps them)", SWITCH)
    if memory is not None and memory.weighed is not None:
        logger.info("DFLASH: %s; --mamba-full-memory-ratio %s", memory.weighed, memory.demand.state_share)


def build_pool(original: Callable[..., Any], configurator: Any, **sizes: Any) -> Any:
    """Around ``KVCacheConfigurator._build_hybrid_req_pool``, which refuses a replay for DFLASH unless the model is KDA.

    There the KDA configuration decides nothing else that the GDN one does not decide too.
    """
    if our_worker_serves() and configurator.hybrid_kda_config is None:
        configurator = copy.copy(configurator)
        configurator.hybrid_kda_config = configurator.hybrid_gdn_config
    return original(configurator, **sizes)


def charge_windows(original: Callable[..., Any], configurator: Any, total_rest_memory: float) -> Any:
    """Around ``KVCacheConfigurator._handle_max_mamba_cache``, which forgets the convolution's windows under a replay.

    Args:
        total_rest_memory: GiB that are left for recurrent states and K/V.
    """
    if our_worker_serves() and get_exec().mamba.enable_linear_replayssm_spec:
        params = configurator.mambaish_config.mamba2_cache_params
        block = get_spec().speculative_num_draft_tokens
        window = sum(math.prod(shape) // min(shape) * (min(shape) + block - 1) for shape in params.shape.conv)
        rows = get_schedule().max_running_requests + 1
        total_rest_memory -= rows * window * params.dtype.conv.itemsize * len(params.layers) / (1 << 30)
    return original(configurator, total_rest_memory)
