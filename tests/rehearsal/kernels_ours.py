"""This package's kernels, launched as a server of a published pair launches them; see tests/ops/launches.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from sglang_dflash import ops
from sglang_dflash.model.attention import QKNormRope
from sglang_dflash.states.reference import Records
from tests.ops.launches import tensor
from tests.rehearsal.kernels_pairs import RankShapes

REQUEST_ROWS = 512
RING = 16  # positions of a block that are recorded


def launch_ours(shapes: RankShapes, *, bs: int, width: int, skipped: int = 0) -> None:
    """Every kernel of a step, once.

    Args:
        skipped: entries cut off the front of what may be part of a longer tensor.
    """

    def longs(*shape: int) -> Tensor:
        return tensor(*shape, skipped=skipped)

    context, vocab = shapes.drafter.max_position_embeddings, shapes.vocab
    table = tensor(REQUEST_ROWS, context + 20, dtype=torch.int32)
    ops.prepare_block(longs(bs), longs(bs), longs(bs), table, width=width, mask_token_id=shapes.drafter.mask_token_id)
    _norm_rope(shapes, longs(bs * width))
    ops.accept_block(longs(bs, width), longs(bs, width), longs(bs))
    ops.penalize_block(
        tensor(bs, width, vocab, dtype=torch.float32),
        longs(bs, width),
        tensor(REQUEST_ROWS, vocab, dtype=torch.int32),
        longs(bs),
        tensor(REQUEST_ROWS, 3, dtype=torch.float32),
    )
    ops.seeded_draw(tensor(bs * width, vocab, dtype=torch.float32), longs(bs * width), longs(bs * width))
    _gdn_replay(shapes, bs, width, longs)


def _gdn_replay(shapes: RankShapes, bs: int, width: int, longs: Callable[..., Tensor]) -> None:
    """Verify of a linear-attention layer, then the commit of two, with and without tracked states."""
    H, HV = shapes.key_heads, shapes.value_heads
    K, V = shapes.target["linear_key_head_dim"], shapes.target["linear_value_head_dim"]

    def half(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.bfloat16)

    def ring(*leading: int) -> Records:
        updates, keys = (*leading, REQUEST_ROWS, HV, RING, V), (*leading, REQUEST_ROWS, H, RING, K)
        decays = tensor(*updates[:-1], dtype=torch.float32)
        return Records(half(*updates), half(*keys), decays, half(*updates), half(*keys))

    states, tokens = tensor(2, REQUEST_ROWS, HV, V, K, dtype=torch.float32), bs * width
    ops.gdn_verify(
        half(tokens, H, K), half(tokens, H, K), half(tokens, HV, V), half(tokens, HV), half(tokens, HV),
        tensor(HV, dtype=torch.float32), half(HV), states[0], longs(bs), ring(), longs(bs), width=width, scale=K**-0.5,
    )  # fmt: skip
    for track in ((None, None), (longs(bs), longs(bs))):
        ops.gdn_commit(states, ring(2), longs(bs), longs(bs), longs(bs), *track)


def _norm_rope(shapes: RankShapes, positions: Tensor) -> None:
    """Queries and keys of a block's layer, then the context's keys of all layers."""
    drafter, heads, kv_heads = shapes.drafter, shapes.draft_heads, shapes.draft_kv_heads
    layers, head_dim, tokens = drafter.num_layers, drafter.head_dim, len(positions)

    def norm() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(tensor(head_dim, dtype=torch.bfloat16))
        return module

    rotary = SimpleNamespace(
        _ensure_cos_sin_cache_length=lambda length: None,
        cos_sin_cache=tensor(drafter.max_position_embeddings, drafter.rotary_dim, dtype=torch.float32),
        is_neox_style=True,
    )
    norms = [(norm(), norm()) for _ in range(layers)]
    norm_rope = QKNormRope(norms, heads, kv_heads, drafter.rms_norm_eps, rotary, drafter.max_position_embeddings)
    qkv = tensor(tokens, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
    norm_rope.block(positions)(0, qkv, heads * head_dim)
    context = tensor(layers, tokens, 2, kv_heads, head_dim, dtype=torch.bfloat16)
    norm_rope.context_keys(context[:, :, 0], positions)
