"""SGLang's attention backend interface over :mod:`attention_math`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu.layers.attention_math import (
    Contexts,
    Keys,
    attend,
    attend_prompt,
    attend_prompt_rows,
    attend_rows,
    block_keys,
    decode_keys,
    row_keys,
)


class TorchAttentionBackend(AttentionBackend):
    """Attention in plain torch for every forward mode of DFLASH.

    ``seq_lens`` is host memory on a CPU, so no mirror is requested. With ``by_row`` every causal row is computed
    separately: a verify's rows are bit-identical to plain decoding's, and a prompt's do not depend on its split.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, *, by_row: bool = False) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        pool = self.token_to_kv_pool
        self._swa_pool: Any = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None
        self._by_row = by_row

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        # The first layer that needs keys builds them for all layers.
        self._keys: dict[tuple[int | None, bool, bool], list[Keys]] = {}
        self._rows: dict[int | None, list[tuple[Tensor, Keys]]] = {}
        self._swa_out_loc = None
        if self._swa_pool is not None and not forward_batch.forward_mode.is_idle():
            self._swa_out_loc = self._swa_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def support_triton(self) -> bool:
        return False

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unsupported: Any,
    ) -> Tensor:
        """Attend in one layer, in any forward mode: ``q [tokens, H*D]`` to ``[tokens, H*Dv]``.

        Absorbed MLA is attention with one K/V head, whose values are the first columns of its keys.

        Raises:
            DFlashError: the layer needs an unsupported operation.
        """
        self._refuse_unsupported(layer, unsupported)
        if save_kv_cache and k is not None:
            location = KVWriteLoc.for_batch(forward_batch, swa_loc=self._swa_out_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        k_pool, v_pool = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        mode = forward_batch.forward_mode
        verifies = mode.is_decode() or mode.is_target_verify()
        if verifies and self._by_row and not self._kind(layer)[2]:
            out = attend_rows(q, k_pool, v_pool, self._rows_of(layer, forward_batch), scale=layer.scaling, sinks=sinks)
        elif verifies:
            keys, batch = self._keys_of(layer, forward_batch), forward_batch.batch_size
            out = attend(q, k_pool, v_pool, keys, batch=batch, scale=layer.scaling, sinks=sinks)
        else:
            out = self._prefill(q, layer, forward_batch, sinks)
        return out.reshape(q.shape[0], -1)

    forward_decode = forward_extend

    def _keys_of(self, layer: Any, forward_batch: Any) -> list[Keys]:
        # Shared by all layers with the same window, mask and pool.
        kind = self._kind(layer)
        if kind not in self._keys:
            window, causal, swa = kind
            rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
            contexts = Contexts(self.req_to_token_pool.req_to_token, rows, lens)
            if forward_batch.forward_mode.is_decode():
                keys = decode_keys(contexts, window=window)
            else:
                slots = forward_batch.out_cache_loc.view(len(lens), -1)
                keys = block_keys(contexts, slots, causal=causal, window=window)
            if swa:
                keys = [Keys(self._swa_pool.translate_loc_from_full_to_swa(each.slots), each.mask) for each in keys]
            self._keys[kind] = keys
        return self._keys[kind]

    def _rows_of(self, layer: Any, forward_batch: Any) -> list[tuple[Tensor, Keys]]:
        # As _keys_of for deterministic inference: a verify's positions are decode rows.
        window = self._kind(layer)[0]
        if window not in self._rows:
            rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
            if not forward_batch.forward_mode.is_decode():
                width = len(forward_batch.out_cache_loc) // len(lens)
                rows, lens = rows.repeat_interleave(width), (lens[:, None] + torch.arange(1, width + 1)).flatten()
            self._rows[window] = row_keys(Contexts(self.req_to_token_pool.req_to_token, rows, lens), window=window)
        return self._rows[window]

    def _prefill(self, q: Tensor, layer: Any, forward_batch: Any, sinks: Tensor | None) -> Tensor:
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        k_pool, v_pool = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        window, causal, swa = self._kind(layer)
        by_row = self._by_row and causal and not swa
        options: dict[str, Any] = {"window": window, "scale": layer.scaling, "sinks": sinks}
        options |= {} if by_row else {"causal": causal}
        start = 0
        for row, prefix, length in zip(
            forward_batch.req_pool_indices.numpy().tolist(),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        ):
            oldest = 0 if window is None or by_row else max(0, prefix - window)
            slots = self.req_to_token_pool.req_to_token[row, oldest : prefix + length]
            if swa:
                slots = self._swa_pool.translate_loc_from_full_to_swa(slots)
            k, v = (pool.index_select(0, slots).float() for pool in (k_pool, v_pool))
            attention = attend_prompt_rows if by_row else attend_prompt
            out[start : start + length] = attention(q[start : start + length].float(), k, v, prefix=prefix, **options)
            start += length
        return out

    def _kind(self, layer: Any) -> tuple[int | None, bool, bool]:
        """Return window or None, causality, and whether the K/V are in the sliding pool."""
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        swa = self._swa_pool is not None and self._swa_pool.layers_mapping[layer.layer_id][1]
        return window, layer.attn_type != AttentionType.ENCODER_ONLY, swa

    @staticmethod
    def _refuse_unsupported(layer: Any, extras: dict[str, Any]) -> None:
        found = [name for name, value in extras.items() if value is not None]
        found += [f"logit_cap={layer.logit_cap}"] if layer.logit_cap else []
        found += ["cross attention"] if layer.is_cross_attention else []
        if found:
            raise DFlashError(
                f"attention layer {layer.layer_id} needs {', '.join(found)}",
                remedy="serve this architecture on a machine with an accelerator",
            )
