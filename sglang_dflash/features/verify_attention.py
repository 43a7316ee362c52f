"""The target's attention in a verify: the drafter's kernel replaces that of SGLang's Triton backend.

The kernel splits the context over the GPU, and needs no metadata from the host.
"""

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_dflash.launch.launch import is_tile
from sglang_dflash.model.backend import attend_block
from sglang_dflash.upstream.hooks import Hooks


def verify(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *save: bool, **options: Any
) -> Any:
    """Hook around ``TritonAttnBackend.forward_extend``: run the drafter's kernel in a verify of its layers."""
    saves = k is not None and all((*save, options.get("save_kv_cache", True)))
    if saves and forward_batch.forward_mode.is_target_verify() and _serves(backend, layer, options):
        return attend_block(backend, q, k, v, layer, forward_batch, options.get("sinks"))
    return original(backend, q, k, v, layer, forward_batch, *save, **options)


def _serves(backend: Any, layer: Any, options: dict[str, Any]) -> bool:
    others = {name for name, value in options.items() if value is not None} - {"sinks", "save_kv_cache"}
    return (
        not (backend.is_draft_runner or backend.enable_deterministic or backend.use_mla or others)
        and not (isinstance(backend.token_to_kv_pool, SWAKVPool) or backend.kv_index_translator.is_translating)
        and backend.dcp_size == 1
        and layer.xai_temperature_len <= 0
        and layer.attn_type == AttentionType.DECODER
        and layer.qk_head_dim == layer.v_head_dim
        and is_tile(layer.head_dim)
    )


def read_to_the_end(ends: Any, backend: Any, *args: Any, **options: Any) -> Any:
    """Hook after ``TritonAttnBackend.shared_read_ends``: the kernel reads the slot table, not a copy."""
    return SharedReadEnds.POST_REPLAY if ends is SharedReadEnds.IN_REPLAY else None


_TRITON = "layers.attention.triton_backend.TritonAttnBackend"
HOOKS = Hooks(around={f"{_TRITON}.forward_extend": verify}, after={f"{_TRITON}.shared_read_ends": read_to_the_end})
