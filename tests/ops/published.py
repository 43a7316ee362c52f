"""Our kernels, launched as a server of a published pair does it.

No GPU is needed: the launchers are called on tensors without storage, under Triton's warm-up (``launches.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash import ops
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import text_config
from sglang_dflash.features.copies import MARGIN, MAX_MATCH, MIN_MATCH
from sglang_dflash.model.attention import QKNormRope
from sglang_dflash.model.vocabulary import CANDIDATES
from sglang_dflash.ops import Noise
from sglang_dflash.states.reference import Records
from sglang_dflash.states.replay import gdn_commit, gdn_verify, windows_by_token
from sglang_dflash.states.verify import gdn_convolve
from tests.ops.launches import tensor
from tests.support.cards import FOLDER, NAMES
from tests.support.files import load_config, load_drafter

REQUEST_ROWS = 512
# Width of a step and of the server's widest block: a published drafter's, or twice that for copies.
STEPS = {"16": (16, 16), "16 of 32": (16, 32), "32": (32, 32)}


@dataclass(frozen=True)
class RankShapes:
    """One rank's share of a pair: the whole drafter and the published configuration of the whole target; heads of the
    drafter, and of the target's gated delta net, on this rank."""

    name: str
    drafter: DrafterConfig
    target: Any
    draft_heads: int
    draft_kv_heads: int
    key_heads: int
    value_heads: int

    @property
    def vocab(self) -> int:
        """Logits of a position; every rank sees all of them, without a gap (both vocabularies fill the rows that SGLang
        pads to)."""
        return int(self.target["vocab_size"])


def rank_shapes(tp_sizes: tuple[int, ...]) -> list[RankShapes]:
    """Return every published pair at these tensor-parallel sizes."""
    found = []
    for pair, tp in product(NAMES, tp_sizes):
        drafter = load_drafter(FOLDER / pair / "drafter")
        target = text_config(load_config(FOLDER / pair / "target"))
        divided = drafter.num_heads, target["linear_num_key_heads"], target["linear_num_value_heads"]
        assert not any(heads % tp for heads in divided), pair
        heads, key_heads, value_heads = (heads // tp for heads in divided)
        kv_heads = max(1, drafter.num_kv_heads // tp)
        found.append(RankShapes(f"{pair} TP {tp}", drafter, target, heads, kv_heads, key_heads, value_heads))
    return found


def launch_ours(shapes: RankShapes, *, bs: int, width: int, block: int = 16, skipped: int = 0) -> None:
    """Every kernel of a step, once.

    Args:
        block: positions that a server records of a step.
        skipped: entries cut off the front of what may be part of a longer tensor.
    """

    def longs(*shape: int) -> Tensor:
        return tensor(*shape, skipped=skipped)

    context, vocab = shapes.drafter.max_position_embeddings, shapes.vocab
    table = tensor(REQUEST_ROWS, context + 20, dtype=torch.int32)
    mask, states = shapes.drafter.mask_token_id, tensor(REQUEST_ROWS, dtype=torch.int32)
    ops.prepare_block(*[longs(bs)] * 3, table, width=width, mask_token_id=mask, state_table=states)
    drafts, drafted = tensor(bs, width - 1), tensor(bs, width - 1, dtype=torch.float32)
    ops.take_drafts(longs(bs, width), drafts, longs(bs), tensor(1), drafted)
    _norm_rope(shapes, longs(bs * width))
    ops.accept_block(longs(bs, width), longs(bs, width), longs(bs), interval=256)
    captured = len(shapes.drafter.target_layer_ids) * shapes.drafter.hidden_size
    hidden = tensor(bs * width, captured, dtype=torch.bfloat16)
    accept_lens = tensor(bs, dtype=torch.int32, skipped=skipped)
    ops.stage_block(hidden, *[longs(bs * width)] * 2, accept_lens, hidden, *[tensor(bs * width)] * 2)
    block_logits = tensor(bs, width, vocab, dtype=torch.float32)
    counts, coefficients = tensor(REQUEST_ROWS, vocab, dtype=torch.int32), tensor(REQUEST_ROWS, 3, dtype=torch.float32)
    ops.penalize_block(block_logits, longs(bs, width), counts, longs(bs), coefficients)
    sizes = {"first": 1, "size": 2064, "window": 2048, "page": 1}
    ops.view_rings(table, tensor(REQUEST_ROWS), longs(bs), longs(bs), longs(bs * width), **sizes)
    history, found = tensor(REQUEST_ROWS, context + 34, dtype=torch.int32), tensor(REQUEST_ROWS, 2)
    appended = longs(bs), longs(bs, width), longs(bs)
    ops.match_copies(history, found, longs(bs), *appended, longest=MAX_MATCH, bound=context)
    margins = tensor(bs, width - 1, dtype=torch.float32, skipped=skipped)
    ops.take_copies(longs(bs, width), margins, history, found, longs(bs), longs(bs), least=MIN_MATCH, margin=MARGIN)
    logits, seeds = tensor(bs * width, vocab, dtype=torch.float32), longs(bs * width)
    each = tensor(bs * width, dtype=torch.float32, skipped=skipped)
    filters = tensor(bs * width, dtype=torch.int32, skipped=skipped), each, each
    for asked in (None, filters):
        ops.seeded_tokens(logits, each[:, None], asked, seeds, seeds)
    noise = _noise(bs)
    for k, asked in ((1, None), (CANDIDATES, noise)):
        ops.leading_tokens(tensor(bs * width, vocab, dtype=torch.bfloat16), k, asked)
    drafted_logits = tensor(bs, width - 1, vocab, dtype=torch.bfloat16)
    ops.likeliest_tokens(drafted_logits, CANDIDATES, longs(bs, width)[:, 0], noise)
    _attention(shapes, bs, width, table, longs)
    _dflash2(shapes, bs, width, skipped)
    _gdn_convolve(shapes, bs, width, block, longs)
    _gdn_replay(shapes, bs, width, block, longs)


def half(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.bfloat16)


def _noise(bs: int) -> Noise:
    """The first entries of a server's memory."""
    each = tensor(bs, dtype=torch.float32)
    return Noise(tensor(bs), each, tensor(bs, dtype=torch.int32), each, each)


def _attention(shapes: RankShapes, bs: int, width: int, table: Tensor, longs: Callable[..., Tensor]) -> None:
    """Layers of the drafter, full (with K/V of 16 and 8 bits) and sliding, and the target's verify."""
    drafter, target = shapes.drafter, shapes.target
    tp = drafter.num_heads // shapes.draft_heads
    heads, kv_heads = target["num_attention_heads"] // tp, max(1, target["num_key_value_heads"] // tp)
    drafts = shapes.draft_heads, shapes.draft_kv_heads, drafter.head_dim
    for (q, kv, dim), causal, window in (
        (drafts, False, -1),
        (drafts, True, 2047),
        ((heads, kv_heads, target["head_dim"]), True, -1),
    ):
        queries, scale = tensor(bs * width, q, dim, dtype=torch.bfloat16), dim**-0.5
        for stored in (torch.bfloat16, torch.float8_e4m3fn)[: 1 if causal else 2]:
            inputs = queries, *[tensor(4096, kv, dim, dtype=stored)] * 2, table, longs(bs), longs(bs)
            ops.block_attention(*inputs, scale=scale, causal=causal, window=window)


def _dflash2(shapes: RankShapes, bs: int, width: int, skipped: int) -> None:
    """Both convolutions of a sublayer and the walk, with the sizes of Qwen3.8-27B's drafter beyond the plain ones."""
    taps, group, rank, top_k, hidden = 2, 16, 256, 16, shapes.drafter.hidden_size
    base, corrections = half(2, taps, hidden), half(bs * width, 2, taps, hidden // group)
    for side in range(2):
        ops.convolve_block(half(bs * width, hidden), base[side], corrections[:, side], width=width)
    candidates, unary = tensor(bs, width - 1, top_k), tensor(bs, width - 1, top_k, dtype=torch.float32)
    pairs = half(bs, width - 1, rank), half(shapes.vocab, rank), half(shapes.vocab, rank)
    walk = candidates, unary, *(tensor(bs, width, skipped=skipped)[:, 0] for _ in range(2)), _noise(bs)
    ops.walk_candidates(*walk)
    ops.walk_candidates(*walk, pairs)


def _gdn_convolve(shapes: RankShapes, bs: int, width: int, block: int, longs: Callable[..., Tensor]) -> None:
    """Projections in one product, and in two; then without z."""
    HV, V = shapes.value_heads, shapes.target["linear_value_head_dim"]
    dim = 2 * shapes.key_heads * shapes.target["linear_key_head_dim"] + HV * V
    row = dim * (block + 2)
    memory = half(1, REQUEST_ROWS, dim, block + 2)
    windows = windows_by_token(memory.as_strided((1, REQUEST_ROWS, block, dim, 3), (0, row, 1, block + 2, 1)))[0]
    states, weight, tokens = half(REQUEST_ROWS, dim, 3), half(dim, 4), bs * width
    recurrent = tensor(REQUEST_ROWS, HV, V, shapes.target["linear_key_head_dim"], dtype=torch.float32)
    fused, gates = half(tokens, dim + HV * V + 2 * HV), half(tokens, 2 * HV)
    qkvz, own_gates = fused.split([dim + HV * V, 2 * HV], -1)
    apart, split = half(tokens, dim + HV * V), half(tokens, dim)
    for x, ba in ((qkvz, own_gates), (apart, gates), (split, gates)):
        b, a = ba.chunk(2, -1)
        gdn_convolve(x, a, b, weight, None, states, longs(bs), windows, longs(bs), width=width, recurrent=recurrent)


def _gdn_replay(
    shapes: RankShapes,
    bs: int,
    width: int,
    block: int,
    longs: Callable[..., Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Verify of a linear-attention layer, then the commit of two, with and without tracked states."""
    H, HV = shapes.key_heads, shapes.value_heads
    K, V = shapes.target["linear_key_head_dim"], shapes.target["linear_value_head_dim"]

    def half(*shape: int) -> Tensor:
        return tensor(*shape, dtype=dtype)

    def ring(*leading: int) -> Records:
        updates, keys = (*leading, REQUEST_ROWS, HV, block, V), (*leading, REQUEST_ROWS, H, block, K)
        decays = tensor(*updates[:-1], dtype=torch.float32)
        low = () if dtype == torch.float32 else (half(*updates), half(*keys))
        return Records(half(*updates), half(*keys), decays, *low)

    states, tokens = tensor(2, REQUEST_ROWS, HV, V, K, dtype=torch.float32), bs * width
    gdn_verify(
        half(tokens, H, K), half(tokens, H, K), half(tokens, HV, V), half(tokens, HV), half(tokens, HV),
        tensor(HV, dtype=torch.float32), half(HV), states[0], longs(bs), ring(), longs(bs), width=width, scale=K**-0.5,
        round_beta=True,
    )  # fmt: skip
    for track in ((None, None), (longs(bs), longs(bs))):
        gdn_commit(states, ring(2), longs(bs), longs(bs), longs(bs), *track)


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
