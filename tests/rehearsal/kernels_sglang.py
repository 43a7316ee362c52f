"""SGLang's own Triton kernels around a step, launched by SGLang's code: all of its gated delta net, and attention.

Only in a process where :func:`tests.rehearsal.kernels_device.pretend` has run. Not here: matrix products, mixture of
experts, all-reduce, and whatever the chosen attention backend has of its own (FA3, FlashInfer, TRT-LLM).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm as RMSNormGated
from sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate import fused_qk_gemma_rmsnorm_rope_gate
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
from sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode import (
    commit_gdn_replayssm_circular,
    commit_gdn_replayssm_spec,
)
from sglang.kernels.ops.attention.triton_gdn_fused_proj import (
    fused_qkvzba_split_reshape_cat,
    fused_qkvzba_split_reshape_cat_contiguous,
    qwen3_5_gdn_prefill_projection_views,
)
from sglang.kernels.ops.elementwise.elementwise import fused_sigmoid_mul
from sglang.kernels.ops.mamba.mamba_state_indices_triton import fused_replay_state_indices
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_commit_track_indices,
    fused_conv_window_scatter_with_mask,
    scatter_mamba_states_after_mtp_verify,
    track_mamba_states_all_layers,
)
from sglang.kernels.ops.memory.common import get_last_loc_triton, write_req_to_token_pool_triton
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from tests.ops.launches import tensor
from tests.rehearsal.kernels_pairs import RankShapes

SLOTS = 65  # of recurrent states
RING = 16  # --linear-replayssm-cache-len, its default
PREFILL = (700, 33)  # tokens of two prompts


def half(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.bfloat16)


def ints(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.float32)


def launch_verify(shapes: RankShapes, *, bs: int, width: int) -> None:
    """A target's forward over a block in every layer, then the commit of what was accepted."""
    net = GatedDeltaNet(shapes, bs, width)
    net.verify()
    pool = net.pool.mamba_cache
    lens, rows = ints(bs), ints(bs, width)
    last, track = fused_commit_track_indices(rows, lens, tensor(bs), width, 256)
    scatter_mamba_states_after_mtp_verify(pool, ints(bs), last, tensor(bs), track)
    fused_replay_state_indices(
        req_pool_indices=tensor(bs),
        mamba_index_mapping=ints(SLOTS),
        out_state_indices=ints(bs),
        valid_bs=bs - 1,
        total_bs=bs,
    )
    _attention(shapes.heads, shapes.kv_heads, shapes.target["head_dim"], bs, width, causal=True)
    drafter = shapes.drafter
    for window, causal in {(_window(kind, drafter.sliding_window), c) for kind, c in _layers(drafter)}:
        heads, kv_heads = shapes.draft_heads, shapes.draft_kv_heads
        _attention(heads, kv_heads, drafter.head_dim, bs, width, causal=causal, window=window)
    _gated_queries(shapes, bs * width)


def launch_replay(shapes: RankShapes, *, bs: int, width: int) -> None:
    """The same with ``--enable-linear-replayssm-spec``: the block's inputs are kept instead of its states."""
    net = GatedDeltaNet(shapes, bs, width, replay=True)
    net.verify()
    pool, state = net.pool, net.pool.mamba_cache
    cursors = {
        "write_pos": pool.replayssm_spec_write_pos,
        "cache_base": pool.replayssm_cache_base,
        "is_flush": pool.replayssm_is_flush,
        "replay_indices": tensor(bs),
        "null_block_id": -1,
    }
    commit_gdn_replayssm_spec(
        num_accepted=ints(bs),
        max_cache_len=RING,
        max_spec_len=width,
        fold_every_commit=state.temporal.dtype != torch.float32,
        **cursors,
    )
    for track in (None, tensor(bs)):
        commit_gdn_replayssm_circular(
            checkpoint_state=state.temporal,
            d_cache=state.replayssm_d,
            k_cache=state.replayssm_k,
            g_cache=state.replayssm_g,
            d_residual_cache=state.replayssm_rawv,
            k_residual_cache=state.replayssm_rawk,
            state_batch_indices=ints(bs),
            accept_lens=ints(bs),
            mamba_track_indices=track,
            mamba_steps_to_track=track,
            **cursors,
        )
    fused_conv_window_scatter_with_mask(state.conv[0], state.intermediate_conv_window[0], ints(bs), tensor(bs))


def launch_decode(shapes: RankShapes, *, bs: int) -> None:
    """One token a request, without speculation."""
    net = GatedDeltaNet(shapes, bs, width=16)
    net.decode()
    pool = net.pool.mamba_cache
    mask = tensor(bs, dtype=torch.bool)
    track_mamba_states_all_layers(pool.conv[0], pool.temporal, ints(bs), mask, tensor(bs), bs)
    heads, kv_heads, head_dim = shapes.heads, shapes.kv_heads, shapes.target["head_dim"]
    splits = 8
    keys, values = half(4096, kv_heads, head_dim), half(4096, kv_heads, head_dim)
    decode_attention_fwd(
        half(bs, heads, head_dim),
        keys,
        values,
        half(bs, heads, head_dim),
        ints(bs + 1),
        tensor(4096),
        floats(bs, heads, splits, head_dim),
        floats(bs, heads, splits),
        ints(bs),
        splits,
        head_dim**-0.5,
        1.0,
        1.0,
    )


def launch_prefill(shapes: RankShapes) -> None:
    """Two prompts at once."""
    net = GatedDeltaNet(shapes, len(PREFILL), width=16)
    net.prefill(block_table=None)
    net.prefill(block_table=ints(12, 2))
    _attention(shapes.heads, shapes.kv_heads, shapes.target["head_dim"], len(PREFILL), max(PREFILL), causal=True)


def launch_slots(shapes: RankShapes, *, bs: int) -> None:
    """KV slots of a prefill and of a block, by the page and by the token."""
    table = ints(SLOTS, shapes.drafter.max_position_embeddings)
    rows, lens = tensor(bs), tensor(bs)
    write_req_to_token_pool_triton[(bs,)](table, rows, tensor(bs), lens, lens, lens, tensor(4096), table.shape[1])
    last = get_last_loc_triton(table, rows, lens)
    assign_req_to_token_pool_func(rows, table, lens, lens, tensor(4096), bs)
    pages = PagedTokenToKVPoolAllocator(1 << 16, 16, torch.bfloat16, "cuda", None, need_sort=False)
    with torch.device("cpu"):
        on_host = torch.zeros(bs, dtype=torch.int64)
    pages.alloc_extend(lens, on_host, lens, on_host, last, 4096)


class GatedDeltaNet:
    """One linear-attention layer of a target in SGLang's backend, all kernels Triton's."""

    def __init__(self, shapes: RankShapes, bs: int, width: int, *, replay: bool = False) -> None:
        self.shapes, self.bs, self.width = shapes, bs, width
        target = shapes.target
        keys, values = shapes.key_heads, shapes.value_heads
        key_dim, value_dim = target["linear_key_head_dim"], target["linear_value_head_dim"]
        self.interleaved = "Qwen3Next" in target.get("architectures", [""])[0]
        state = Mamba2StateShape.create(
            tp_world_size=shapes.tp,
            intermediate_size=value_dim * target["linear_num_value_heads"],
            n_groups=target["linear_num_key_heads"],
            num_heads=target["linear_num_value_heads"],
            head_dim=value_dim,
            state_size=key_dim,
            conv_kernel=target["linear_conv_kernel_dim"],
        )
        self.pool = MambaPool(
            size=SLOTS - 1,
            spec_state_size=max(bs, 32),
            cache_params=Mamba2CacheParams(
                shape=state, layers=[0, 1], dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
            ),
            mamba_layer_ids=[0, 1],
            device="cuda",
            speculative_num_draft_tokens=width,
            enable_linear_replayssm_spec=replay,
            linear_replayssm_cache_len=RING,
        )
        channels = self.pool.mamba_cache.conv[0].shape[2]
        self.layer = RadixLinearAttention(
            layer_id=1,
            num_q_heads=keys,
            num_k_heads=keys,
            num_v_heads=values,
            head_q_dim=key_dim,
            head_k_dim=key_dim,
            head_v_dim=value_dim,
            conv_weights=half(channels, target["linear_conv_kernel_dim"]),
            activation=target["hidden_act"],
            A_log=floats(values),
            dt_bias=half(values),
        )
        norm = FusedRMSNormGated if self.interleaved else RMSNormGated
        self.norm = norm(value_dim, eps=1e-6, device="cuda", dtype=torch.bfloat16)
        self.backend = object.__new__(GDNAttnBackend)  # its constructor asks a model runner
        triton = LinearAttnKernelBackend.TRITON
        vars(self.backend).update(
            req_to_token_pool=SimpleNamespace(
                mamba_pool=self.pool, mamba2_layer_cache=self.pool.mamba2_layer_cache, size=max(bs, 32)
            ),
            kernel_dispatcher=GDNKernelDispatcher(triton, triton, triton),
            verify_intermediate_state_indices=ints(max(bs, 32)),
            mis_metadata=None,
            _use_strided_target_verify_qkv=False,
        )

    def verify(self) -> None:
        batch = self._batch(
            ForwardMode.TARGET_VERIFY,
            tokens=self.bs * self.width,
            query_start_loc=ints(self.bs + 1),
            spec_info=SimpleNamespace(draft_token_num=self.width),
        )
        self.backend._init_target_verify_qkv_routing(batch)
        mixed, z, b, a = self._projected(self.bs * self.width)
        self._normed(self.backend.forward_extend(self.layer, batch, mixed, a, b), z)

    def decode(self) -> None:
        batch = self._batch(ForwardMode.DECODE, tokens=self.bs, query_start_loc=ints(self.bs + 1))
        mixed, z, b, a = self._projected(self.bs)
        self._normed(self.backend.forward_decode(self.layer, batch, mixed, a, b), z)

    def prefill(self, *, block_table: Tensor | None) -> None:
        tokens = sum(PREFILL)
        with torch.device("cpu"):  # the host reads how many chunks there are
            starts = torch.tensor([0, PREFILL[0], tokens], dtype=torch.int32)
        batch = self._batch(
            ForwardMode.EXTEND,
            tokens=tokens,
            query_start_loc=starts,
            extend_prefix_lens=ints(len(PREFILL)),
            extend_seq_lens_cpu=list(PREFILL),
        )
        self.backend.forward_metadata.conv_block_table = block_table
        mixed, z, b, a = self._projected(tokens, prefill=True)
        self._normed(self.backend.forward_extend(self.layer, batch, mixed, a, b), z)

    def _batch(self, mode: ForwardMode, *, tokens: int, query_start_loc: Tensor, **fields: Any) -> Any:
        self.backend.forward_metadata = ForwardMetadata(
            query_start_loc=query_start_loc, mamba_cache_indices=ints(self.bs)
        )
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=self.bs,
            input_ids=tensor(tokens),
            req_pool_indices=tensor(self.bs),
            mamba_track_mask=None,
            **fields,
        )

    def _projected(self, tokens: int, *, prefill: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out of the input projection: Q, K and V side by side, the gate z, and the two gates b and a."""
        layer = self.layer
        sizes = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        wide, narrow = 2 * layer.k_dim + 2 * layer.v_dim, 2 * layer.num_v_heads
        if self.interleaved:
            return fused_qkvzba_split_reshape_cat(half(tokens, wide), half(tokens, narrow), *sizes)
        both = half(tokens, wide + narrow)  # one product for both
        split = qwen3_5_gdn_prefill_projection_views if prefill else fused_qkvzba_split_reshape_cat_contiguous
        return split(both[:, :wide], both[:, wide:], *sizes)

    def _normed(self, out: Tensor, z: Tensor) -> None:
        out = out.reshape(-1, out.shape[-1])
        self.norm(out, z if z.stride(0) != z.shape[1] * z.shape[2] else z.reshape(-1, z.shape[-1]))


def _attention(
    heads: int, kv_heads: int, head_dim: int, bs: int, width: int, *, causal: bool, window: int = -1
) -> None:
    """Triton attention of ``width`` new tokens a request over its context."""
    tokens = bs * width
    buffers = half(4096, kv_heads, head_dim), half(4096, kv_heads, head_dim)
    offsets = ints(bs) if window > -1 else None
    extend_attention_fwd(
        half(tokens, heads, head_dim),
        half(tokens, kv_heads, head_dim),
        half(tokens, kv_heads, head_dim),
        half(tokens, heads, head_dim),
        *buffers,
        ints(bs + 1),
        ints(bs + 1),
        tensor(4096),
        None,
        causal,
        tensor(bs + 1),
        width,
        1.0,
        1.0,
        head_dim**-0.5,
        sliding_window_size=window,
        window_kv_offsets=offsets,
    )
    create_flashinfer_kv_indices_triton[(bs, 1)](
        ints(33, 4096), tensor(bs), tensor(bs), ints(bs + 1), offsets, tensor(4096), 4096,
        ENTRY_PAGE_SIZE=1, TOKEN_BLOCK_PARALLEL=False, token_mapping=None,
    )  # fmt: skip


def _layers(drafter: Any) -> set[tuple[str, bool]]:
    return set(zip(drafter.layer_types, drafter.causal, strict=True))


def _window(kind: str, sliding_window: int | None) -> int:
    return sliding_window - 1 if kind == "sliding_attention" and sliding_window else -1


def _gated_queries(shapes: RankShapes, tokens: int) -> None:
    """Norms and rotation of a full-attention layer's queries and keys, and the gate on its output (Qwen3.5)."""
    heads, kv_heads, head_dim = shapes.heads, shapes.kv_heads, shapes.target["head_dim"]
    rotary_dim = int(head_dim * shapes.target["partial_rotary_factor"])
    qkv = half(tokens, (2 * heads + 2 * kv_heads) * head_dim)
    fused_qk_gemma_rmsnorm_rope_gate(
        qkv[:, : 2 * heads * head_dim],
        qkv[:, 2 * heads * head_dim :][:, : kv_heads * head_dim],
        half(head_dim),
        half(head_dim),
        floats(4096, rotary_dim),
        tensor(tokens),
        1e-6,
        heads,
        kv_heads,
        head_dim,
        rotary_dim,
        has_gate=True,
    )
    fused_sigmoid_mul(half(tokens, heads * head_dim), half(tokens, heads * head_dim), inplace=True)
