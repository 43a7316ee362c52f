"""Block attention behind SGLang's interface: the drafter's backend.

It prepares no metadata: the kernel reads lengths and slots from the batch.
"""

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.ops import block_attention


class BlockAttention(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.kv_index_translator = runner.kv_index_translator
        self.token_to_kv_pool, self.req_to_token = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        if runner.token_to_kv_pool.get_key_buffer(0).dim() != 3:
            raise DFlashError(
                "the drafter's K/V are not stored token by token (SGLANG_USE_HND_KVCACHE)",
                remedy="unset it, or choose another --speculative-draft-attention-backend",
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: Any) -> Any:
        return SharedReadEnds.POST_REPLAY  # the kernel reads the slot table

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        assert forward_batch.forward_mode.is_target_verify() and save_kv_cache, forward_batch.forward_mode
        return attend_block(self, q, k, v, layer, forward_batch)


def attend_block(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, sinks: Tensor | None = None
) -> Tensor:
    """Write a block's K/V and attend: ``q [bs * w, H * D]`` to a dense tensor of its shape."""
    pool, scales, written = backend.token_to_kv_pool, {}, [k, v]
    if layer.k_scale is not None:
        scales = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        written = [k.clone(), v.clone(), layer.k_scale, layer.v_scale]  # the pool divides its arguments
    pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), *written)
    out = block_attention(
        q.view(-1, layer.tp_q_head_num, layer.head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        backend.req_to_token,
        forward_batch.req_pool_indices,
        forward_batch.seq_lens,
        scale=layer.scaling,
        causal=layer.attn_type != AttentionType.ENCODER_ONLY,
        window=layer.sliding_window_size,
        cap=layer.logit_cap,
        sinks=sinks,
        **scales,
    )
    return out.flatten(1)
