"""SGLang's attention backend contract on top of :mod:`attention_math`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.cpu.layers.attention import NAME
from sglang_dflash.cpu.layers.attention_math import (
    Keys,
    attend_blocks,
    attend_prompt,
    batched_block_keys,
    block_keys,
    decode_keys,
    padding_pays,
)
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import AttentionBackend, AttentionType, KVWriteLoc, SWAKVPool


class TorchAttentionBackend(AttentionBackend):
    """Attention in plain torch for every forward mode that DFLASH uses.

    Decode, verification (a causal chain) and the drafter's block are one padded gather and one SDPA call for the whole
    batch, unless the padding would cost more than it saves; tree verification and prefill are one SDPA call per
    request. Lengths are read from ``seq_lens`` itself, which on a CPU is host memory, so no mirror is asked for and the
    overlap scheduler takes the path that it takes on a GPU.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.max_context_len = runner.model_config.context_len
        pool = self.token_to_kv_pool
        self._swa_pool: Any = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Forget the last forward; keys are built by the first layer that asks for them, for all layers."""
        self._keys: dict[tuple[int | None, bool, bool], Any] = {}
        self._swa_out_loc = None
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if self._swa_pool is not None:
            self._swa_out_loc = self._swa_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        # numpy reads lengths and rows in place: no torch op, nothing to wait for.
        lens = forward_batch.seq_lens.numpy()
        self._longest, self._shortest = max(int(lens.max()), 1), int(lens.min())
        if not mode.is_decode():
            self._lens, self._rows = lens.tolist(), forward_batch.req_pool_indices.numpy().tolist()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.init_forward_metadata(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> Tensor:
        """One token per request: ``q [B, H*D]`` to ``[B, H*Dv]``."""
        self._refuse_unsupported(layer, unsupported)
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v)
        window, swa = self._window(layer), self._is_swa(layer)
        keys = self._keys.get((window, True, swa))
        if keys is None:
            keys = decode_keys(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                self._longest,
                self._shortest,
                window=window,
            )
            keys = self._keys[window, True, swa] = self._in_pool_of(keys, swa)
        return self._attend(q, layer, [keys], forward_batch.batch_size)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> Tensor:
        """Prefill and verification: ``q [tokens, H*D]`` to ``[tokens, H*Dv]``."""
        self._refuse_unsupported(layer, unsupported)
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v)
        if forward_batch.forward_mode.is_target_verify():
            return self._attend(q, layer, self._block_keys(layer, forward_batch), forward_batch.batch_size)
        return self._prefill(q, layer, forward_batch)

    def _block_keys(self, layer: Any, forward_batch: Any) -> list[Keys]:
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window, swa = self._window(layer), self._is_swa(layer)
        keys: list[Keys] | None = self._keys.get((window, causal, swa))
        if keys is None:
            keys = self._build_block_keys(forward_batch, causal, window)
            keys = self._keys[window, causal, swa] = [self._in_pool_of(each, swa) for each in keys]
        return keys

    def _build_block_keys(self, forward_batch: Any, causal: bool, window: int | None) -> list[Keys]:
        table, slots = self.req_to_token_pool.req_to_token, forward_batch.out_cache_loc.view(len(self._rows), -1)
        tree_mask = getattr(forward_batch.spec_info, "custom_mask", None) if causal else None
        if tree_mask is None and padding_pays(self._lens, slots.shape[1], window):
            rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
            longest, shortest = self._longest, self._shortest
            return [batched_block_keys(table, rows, lens, longest, shortest, slots, causal=causal, window=window)]
        return block_keys(table, self._rows, self._lens, slots, causal=causal, window=window, tree_mask=tree_mask)

    def _prefill(self, q: Tensor, layer: Any, forward_batch: Any) -> Tensor:
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        k_pool, v_pool = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window, swa = self._window(layer), self._is_swa(layer)
        start = 0
        for row, prefix, length in zip(
            self._rows, forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True
        ):
            oldest = 0 if window is None else max(0, prefix - window)
            slots = self.req_to_token_pool.req_to_token[row, oldest : prefix + length]
            if swa:
                slots = self._swa_pool.translate_loc_from_full_to_swa(slots)
            out[start : start + length] = attend_prompt(
                q[start : start + length].float(),
                k_pool.index_select(0, slots).float(),
                v_pool.index_select(0, slots).float(),
                prefix=prefix,
                causal=causal,
                window=window,
                scale=layer.scaling,
            )
            start += length
        return out.view(q.shape[0], -1)

    def _attend(self, q: Tensor, layer: Any, keys: list[Keys], batch: int) -> Tensor:
        k_pool, v_pool = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend_blocks(q, k_pool, v_pool, keys, batch=batch, scale=layer.scaling).view(q.shape[0], -1)

    def _store(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor | None) -> None:
        location = KVWriteLoc.for_batch(forward_batch, swa_loc=self._swa_out_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _is_swa(self, layer: Any) -> bool:
        """Whether the layer's K/V live in the sliding-window part of a hybrid pool."""
        return self._swa_pool is not None and self._swa_pool.layers_mapping[layer.layer_id][1]

    def _in_pool_of(self, keys: Keys, swa: bool) -> Keys:
        return Keys(self._swa_pool.translate_loc_from_full_to_swa(keys.slots), keys.mask) if swa else keys

    @staticmethod
    def _window(layer: Any) -> int | None:
        return layer.sliding_window_size if layer.sliding_window_size > -1 else None

    @staticmethod
    def _refuse_unsupported(layer: Any, extras: dict[str, Any]) -> None:
        """Refuse what would change the result if ignored: score caps, sinks, cross attention, MLA inputs."""
        found = [name for name, value in extras.items() if value is not None]
        if layer.logit_cap:
            found.append(f"logit_cap={layer.logit_cap}")
        if layer.is_cross_attention:
            found.append("cross attention")
        if found:
            raise DFlashError(
                f"attention layer {layer.layer_id} needs {', '.join(found)}",
                expected=f"softmax attention with GQA and sliding windows (attention backend {NAME})",
                remedy="serve this architecture on a machine with an accelerator",
            )
