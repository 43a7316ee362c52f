"""The drafter's RoPE table: it covers every served position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

from sglang_dflash.model.attention import QKNormRope

pytestmark = pytest.mark.sglang

HEAD_DIM, OWN, SERVED = 16, 64, 200
PLAIN = ("plain", lambda rows: rotary(RotaryEmbedding, max_position_embeddings=rows))
YARN = ("yarn", lambda rows: rotary(YaRNScalingRotaryEmbedding, max_position_embeddings=rows // 4, scaling_factor=4.0))


def rotary(kind: Any, **changes: Any) -> Any:
    shape = {"head_size": HEAD_DIM, "rotary_dim": HEAD_DIM, "base": 10_000, "is_neox_style": True}
    return kind(**shape, **changes, dtype=torch.float32)


def qk_norm_rope(own: Any) -> QKNormRope:
    norms = [(nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)) for _ in range(2)]
    return QKNormRope(norms, 4, 2, 1e-6, own, positions=SERVED)


@pytest.mark.parametrize("kind", [PLAIN, YARN], ids=lambda kind: kind[0])
def test_the_table_covers_served_positions_beyond_the_drafters_context(kind: Any) -> None:
    table = qk_norm_rope(kind[1](OWN)).rotary.cos_sin_cache
    assert table.shape[0] >= SERVED
    if kind is PLAIN:
        torch.testing.assert_close(table[:SERVED], kind[1](SERVED).cos_sin_cache)
    else:
        longer = rotary(YaRNScalingRotaryEmbedding, max_position_embeddings=OWN // 4, scaling_factor=4.0)
        angles = torch.arange(SERVED)[:, None] * longer._compute_inv_freq(4.0)
        torch.testing.assert_close(table[:SERVED, : HEAD_DIM // 2], angles.cos() * longer.mscale)


def test_sglang_finds_the_rotation_among_the_drafters_modules() -> None:
    """It grows tables of modules only. It resets all buffers but tables, which no update of weights would restore."""
    drafter = nn.Module()
    drafter.qk_norm_rope = found = qk_norm_rope(PLAIN[1](OWN))
    assert found.rotary in set(drafter.modules())
    assert dict(drafter.named_buffers()).keys() == {"qk_norm_rope.rotary.cos_sin_cache"}
    assert not dict(drafter.named_parameters()) and not drafter.state_dict()


@pytest.mark.parametrize("ask", ["block", "context_keys"])
def test_a_position_past_the_table_is_refused_on_the_cpu(ask: str) -> None:
    found = qk_norm_rope(PLAIN[1](OWN))
    rows = found.rotary.cos_sin_cache.shape[0]
    keys = () if ask == "block" else (torch.zeros(2, 2, 2, HEAD_DIM),)
    with torch.inference_mode():
        getattr(found, ask)(*keys, torch.tensor([0, rows - 1]))
        with pytest.raises(AssertionError, match=f"position {rows} in a RoPE table of {rows} rows"):
            getattr(found, ask)(*keys, torch.tensor([rows, 0]))
