"""A decode step sees as many tokens of a sliding window as a verify does: those before the new one, and itself."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

WINDOW = 8  # earlier tokens that a position attends to: `sliding_window` of the configuration less one
backend = SimpleNamespace(
    sliding_window_size=WINDOW,
    window_kv_indptr=torch.zeros(3, dtype=torch.int32),
    cuda_graph_window_kv_indices=torch.zeros(64, dtype=torch.int64),
    cuda_graph_kv_indices=torch.zeros(64, dtype=torch.int64),
    kv_index_translator=SimpleNamespace(pack_read_stream=lambda *_, **__: True, window_kv_kind=None),
    token_to_kv_pool=None,
    dcp_size=1,
    kv_indptr=torch.zeros(3, dtype=torch.int32),
    _fill_kv_indptr_and_indices=lambda *_: None,
)
lengths = torch.tensor([3, 20], dtype=torch.int32)  # with the new token
*_, seen, _ = TritonAttnBackend._update_decode_kv_buffers(backend, None, 2, lengths, lengths)
assert seen.tolist() == [3, WINDOW + 1], seen.tolist()
