"""What the CPU platform computes for other families than Qwen and Llama, against transformers' own code."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gemma4 import modeling_gemma4 as gemma
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from sglang_dflash_cpu.layers import dense, mamba2
from sglang_dflash_cpu.layers.attention_math import (
    Contexts,
    additive,
    attend,
    attend_prompt,
    attend_prompt_rows,
    attend_rows,
    block_keys,
    row_keys,
    visible,
)

TOKENS, PREFIX, HEADS, GROUPS, DIM, WINDOW = 37, 21, 4, 2, 16, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_a_pool(k: Tensor, v: Tensor) -> tuple[Contexts, Tensor, Tensor]:
    """Return one request's slots in scattered pools of its keys and values ``[TOKENS, G, D]``."""
    slots = torch.randperm(64)[:TOKENS].int()
    pools = [torch.zeros(64, *each.shape[1:]).index_copy_(0, slots.long(), each) for each in (k, v)]
    return Contexts(slots[None], torch.tensor([0]), torch.tensor([TOKENS])), pools[0], pools[1]


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("prefix", [0, PREFIX])
def test_sinks(window: int | None, prefix: int) -> None:
    """In a prompt, a verified block and a decode; in exact mode's rows too."""
    q, k, v = normal(TOKENS, HEADS, DIM), normal(TOKENS, GROUPS, DIM, seed=1), normal(TOKENS, GROUPS, DIM, seed=2)
    sinks, places = normal(HEADS, seed=3), torch.arange(TOKENS)
    own: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    mask = additive(visible(places, places, causal=True, window=window))
    batch = (each.transpose(0, 1)[None] for each in (q, k, v))
    expected = gpt_oss.eager_attention_forward(own, *batch, mask, 0.3)[0][0][prefix:]
    options: dict[str, Any] = {"scale": 0.3, "sinks": sinks}
    first = 0 if window is None else max(0, prefix - window)
    prompt = attend_prompt(q[prefix:], k[first:], v[first:], prefix=prefix, causal=True, window=window, **options)
    assert_close(prompt, expected)
    assert_close(attend_prompt_rows(q[prefix:], k, v, prefix=prefix, window=window, **options), expected)
    contexts, k_pool, v_pool = on_a_pool(k, v)
    before = Contexts(contexts.table, contexts.rows, torch.tensor([prefix]))
    keys = block_keys(before, contexts.table[:, prefix:], causal=True, window=window)
    assert_close(attend(q[prefix:], k_pool, v_pool, keys, batch=1, **options), expected)
    rows = Contexts(contexts.table, torch.zeros(TOKENS - prefix).long(), places[prefix:] + 1)
    assert_close(attend_rows(q[prefix:], k_pool, v_pool, row_keys(rows, window=window), **options), expected)


def test_absorbed_latent_attention() -> None:
    """Queries in the latent space, one K/V head, values that are the first columns of the keys."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None}
    sizes |= {"hidden_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = transformers.DeepseekV3Config(**sizes, attn_implementation="eager")
    layer, hidden, places = deepseek.DeepseekV3Attention(config, 0).eval(), normal(1, TOKENS, 64), torch.arange(TOKENS)
    cos_sin = deepseek.DeepseekV3RotaryEmbedding(config)(hidden, places[None])
    mask = additive(visible(places, places, causal=True, window=None))[None, None]
    q_nope, q_rope = layer.q_proj(hidden).view(1, TOKENS, HEADS, 24).transpose(1, 2).split([16, 8], -1)
    latent, k_rope = layer.kv_a_proj_with_mqa(hidden)[0].split([32, 8], -1)
    q_rope, k_rope = deepseek.apply_rotary_pos_emb_interleave(q_rope, k_rope[None, None], *cos_sin)
    up = layer.kv_b_proj.weight.view(HEADS, 32, 32)  # from the latent space to keys and values
    q = torch.cat((torch.einsum("htd,hdr->thr", q_nope[0], up[:, :16]), q_rope[0].transpose(0, 1)), -1)
    k = torch.cat((layer.kv_a_layernorm(latent), k_rope[0, 0]), -1)[:, None]
    prompt = attend_prompt(q, k, k[..., :32], prefix=0, causal=True, window=None, scale=layer.scaling)
    contexts, k_pool, _ = on_a_pool(k.detach(), k.detach())
    before = Contexts(contexts.table, contexts.rows, torch.tensor([PREFIX]))
    keys = block_keys(before, contexts.table[:, PREFIX:], causal=True, window=None)
    block = attend(q[PREFIX:], k_pool, k_pool[..., :32], keys, batch=1, scale=layer.scaling)
    expected = layer(hidden, cos_sin, attention_mask=mask)[0][0]
    for found, own in ((prompt, expected), (block, expected[PREFIX:])):
        assert_close(layer.o_proj(torch.einsum("thr,hdr->thd", found, up[:, 16:]).flatten(1)), own)


def test_norms_activations_and_caps() -> None:
    x, scale = 3 * normal(TOKENS, 32), normal(32, seed=1)
    router = gemma.Gemma4RMSNorm(32, with_scale=False)
    assert_close(
        dense.gemma4_rms_norm(SimpleNamespace(weight=scale, eps=router.eps, scale_shift=0.0), x), router(x) * scale
    )
    own: Any = SimpleNamespace(limit=7.0, alpha=1.702)
    assert_close(dense.swiglu(4 * x, own.alpha, own.limit), gpt_oss.GptOssExperts._apply_gate(own, 4 * x))
    assert_close(dense.softcap(x.clone(), 2.0), 2 * torch.tanh(x.double() / 2).float())


@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_of_all_heads(ranks: int) -> None:
    """MiniMax-M2's, over the heads of all ranks."""
    norms = [MiniMaxM2RMSNorm(size, 1e-6) for size in (64, 32)]
    both = [normal(TOKENS, len(norm.weight), seed=i) for i, norm in enumerate(norms)]
    for i, norm in enumerate(norms):
        norm.weight.data = normal(len(norm.weight), seed=5 + i)
    shards = [[x.chunk(ranks, 1)[rank] for x in both] for rank in range(ranks)]
    total = torch.stack([dense.sums_of_squares(*shard) for shard in shards]).sum(0)
    for rank, shard in enumerate(shards):
        weights = [norm.weight.data.chunk(ranks)[rank] for norm in norms]
        found = dense.norm_queries_and_keys(*shard, *weights, total, ranks, 1e-6)
        for one, x, norm in zip(found, both, norms, strict=True):
            assert_close(one, norm(x).chunk(ranks, 1)[rank].detach())


STATE, CHUNK = 8, 16


def scanned(tokens: int, seed: int) -> dict[str, Tensor]:
    """Random inputs of Mamba2's scan of one sequence; 4 heads in 2 groups."""
    shapes = {"x": (HEADS, DIM), "dt": (HEADS,), "B": (GROUPS, STATE), "C": (GROUPS, STATE)}
    return {name: normal(1, tokens, *shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


A, D, DT_BIAS = -normal(HEADS, seed=7).exp(), normal(HEADS, seed=8), normal(HEADS, seed=9)


def reference(inputs: dict[str, Tensor], before: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' outputs and last state."""
    x, dt, B, C = inputs.values()
    options: dict[str, Any] = {"dt_bias": DT_BIAS, "initial_states": before, "dt_softplus": True}
    out, state = nemotron.mamba2_chunk_scan(x, dt, A, B, C, CHUNK, D, return_final_states=True, **options)
    return out, state


def test_mamba2_prefill() -> None:
    """Several sequences from their states; states before chunks, at ends and where they are tracked."""
    lengths, before = (37, 16, 5), normal(3, HEADS, DIM, STATE, seed=6)
    sequences = [scanned(tokens, 10 * i) for i, tokens in enumerate(lengths)]
    x, dt, B, C = (torch.cat([each[name] for each in sequences], 1) for name in sequences[0])
    starts, out = [0, *accumulate(lengths)], torch.empty_like(x)
    tracked = [(0, 11), (0, 37), (1, 53)]  # sequences and tokens
    places = torch.tensor(tracked)
    chunks, ends, states = mamba2.prefill(
        x, dt, A, B, C, CHUNK, D, dt_bias=DT_BIAS, cu_seqlens=torch.tensor(starts), out=out, initial_states=before,
        track_seq_idx=places[:, 0], track_end_locs=places[:, 1],
    )  # fmt: skip
    assert states is not None
    found = [*chunks[0], *states[0], *ends]
    of_chunks = [(0, 0), (0, 16), (0, 32), (1, 48)]
    for state, (i, at) in zip(found, [*of_chunks, *tracked, *enumerate(starts[1:])], strict=True):
        part = {name: each[:, : at - starts[i]] for name, each in sequences[i].items()}
        expected = reference(part, before[i : i + 1])[1][0] if at > starts[i] else before[i]
        assert_close(state, expected, rtol=1e-4, atol=1e-4)
    expected = torch.cat([reference(each, before[i : i + 1])[0] for i, each in enumerate(sequences)], 1)
    assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_mamba2_update() -> None:
    """A token of each request, and a block, whose states are stored instead."""
    slots, rows, width, pool = torch.tensor([4, 2, -1]), torch.tensor([7, 0, 3]), 5, normal(6, HEADS, DIM, STATE)
    x, dt, B, C = (torch.cat([scanned(width, 10 * i)[name] for i in range(3)]) for name in ("x", "dt", "B", "C"))
    dt = dt[..., None].expand_as(x)
    a, d, bias = A[:, None, None].expand(-1, DIM, STATE), D[:, None].expand(-1, DIM), DT_BIAS[:, None].expand(-1, DIM)
    common: dict[str, Any] = {"dt_bias": bias, "dt_softplus": True}
    states, expected, after = pool[slots.clamp(min=0)].clone(), [], []
    for t in range(width):
        one = states, x[:, t], dt[:, t], a, B[:, t], C[:, t], d
        expected.append(nemotron.mamba2_selective_state_update(*one, **common))
        after.append(states.clone())
    verified, stored, kept = torch.empty_like(x), torch.zeros(8, width, HEADS, DIM, STATE), pool.clone()
    common["state_batch_indices"] = slots
    mamba2.update(
        pool, x, dt, a, B, C, d, out=verified, **common,
        disable_state_update=True, intermediate_states_buffer=stored, intermediate_state_indices=rows,
    )  # fmt: skip
    assert torch.equal(pool, kept)
    assert_close(verified, torch.stack(expected, 1))
    assert_close(stored[rows], torch.stack(after, 1))
    decoded = torch.empty_like(x[:, 0])
    mamba2.update(pool, x[:, 0], dt[:, 0], a, B[:, 0], C[:, 0], d, out=decoded, **common)
    assert_close(decoded, expected[0])
    assert_close(pool[[4, 2, 0]], after[0])
