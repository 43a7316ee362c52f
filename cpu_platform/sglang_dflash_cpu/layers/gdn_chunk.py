"""Gated delta rule over whole prompts (prefill), which are cut into chunks of 64 tokens.

A chunk is a block in the closed form of :mod:`sglang_dflash.states.reference`. Shapes: q, k ``[..., T, K]``; v
``[..., T, V]``; g, beta ``[..., T]``; states ``[..., V, K]``. All are fp32, and the queries are scaled already.

What a chunk needs of its own tokens is computed for all chunks of all sequences at once. Only the state goes
from chunk to chunk: step c of the loop runs the c-th chunk of every sequence that has one. The sequences are
sorted by decreasing number of chunks, and the chunks laid out step by step, so each step is a slice, and no
sequence is padded to the length of another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from sglang_dflash.states.reference import decay_between, normalized
from sglang_dflash_cpu.layers.mamba_state import live_slots

CHUNK_SIZE = 64


@dataclass(frozen=True)
class _Block:
    """Terms of a block that do not depend on the state before it; every field may have leading dimensions."""

    queries_keys: Tensor  # [2T, K]  e_t q_t, then beta_t e_t k_t
    system: Tensor  # [T, T]  beta_t D[t, i] (k_t . k_i); only i < t is read
    scores: Tensor  # [T, T]  D[t, i] (q_t . k_i)
    values: Tensor  # [T, V]  beta_t v_t
    keys: Tensor  # [T, K]
    decay: Tensor  # [T, T]  D
    decay_in: Tensor  # [T, 1]  e

    def rows(self, rows: slice) -> _Block:
        """The blocks ``rows`` of the first leading dimension."""
        return _Block(*(getattr(self, field.name)[rows] for field in fields(self)))


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Block:
    """Terms of the closed form, for any number of blocks at once (leading dimensions)."""
    decay = decay_between(g)
    decay_in = g.cumsum(-1).exp_().unsqueeze(-1)
    beta = beta.unsqueeze(-1)
    return _Block(
        queries_keys=torch.cat([q * decay_in, k * (beta * decay_in)], -2),
        system=(k @ k.mT).mul_(decay).mul_(beta),
        scores=(q @ k.mT).mul_(decay),
        values=v * beta,
        keys=k,
        decay=decay,
        decay_in=decay_in,
    )


def apply(block: _Block, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run a block from ``state [..., V, K]``: the outputs o and the writes u, both ``[..., T, V]``."""
    from_state, erased = (block.queries_keys @ state.mT).chunk(2, -2)
    writes = torch.linalg.solve_triangular(block.system, block.values - erased, upper=False, unitriangular=True)
    return from_state + block.scores @ writes, writes


def last_state(block: _Block, state: Tensor, writes: Tensor) -> Tensor:
    """State after the block, ``[..., V, K]``."""
    decay_out = block.decay[..., -1, :].unsqueeze(-1)
    return block.decay_in[..., -1:, :] * state + writes.mT @ (block.keys * decay_out)


@dataclass(frozen=True)
class _Layout:
    """Chunks of C tokens in step order; C is the chunk size, or the longest sequence if that is shorter."""

    tokens: Tensor  # [chunks, C] index of each token; a short chunk repeats its last one
    valid: Tensor  # [chunks, C, 1] false for these repetitions
    positions: Tensor  # [tokens] where each token lies in [chunks * C]
    sequences: Tensor  # [N] sequences by decreasing number of chunks
    steps: tuple[slice, ...]  # the chunks of each step
    sequence_major: Tensor  # [chunks] order of the chunks sequence by sequence


@lru_cache(maxsize=8)
def _layout(starts: tuple[int, ...]) -> _Layout:
    """Layout of sequences that begin at ``starts`` (the last entry is the end); some may be empty."""
    lengths = [end - start for start, end in pairwise(starts)]
    size = min(CHUNK_SIZE, max(lengths))
    counts = [-(-length // size) if size else 0 for length in lengths]
    sequences = sorted(range(len(lengths)), key=lambda s: -counts[s])
    per_step = [sum(count > step for count in counts) for step in range(max(counts))]
    chunks = [(s, step) for step, active in enumerate(per_step) for s in sequences[:active]]
    ends = torch.tensor([0, *per_step]).cumsum(0).tolist()

    first = torch.tensor([starts[s] + step * size for s, step in chunks], dtype=torch.long)
    last = torch.tensor([starts[s + 1] - 1 for s, _ in chunks], dtype=torch.long)
    tokens = first[:, None] + torch.arange(size)
    valid = tokens <= last[:, None]
    tokens = torch.minimum(tokens, last[:, None])
    positions = torch.empty(starts[-1] - starts[0], dtype=torch.long)
    positions[tokens[valid]] = valid.flatten().nonzero().flatten()
    return _Layout(
        tokens=tokens,
        valid=valid.unsqueeze(-1),
        positions=positions,
        sequences=torch.tensor(sequences),
        steps=tuple(slice(start, end) for start, end in pairwise(ends)),
        sequence_major=torch.tensor(sorted(range(len(chunks)), key=chunks.__getitem__), dtype=torch.long),
    )


def per_value_head(q: Tensor, k: Tensor, heads: int, *, scale: float | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Queries, scaled, and keys as each of ``heads`` value heads reads them.

    Args:
        q, k: fp32, heads in dimension 1, elements of a head in the last.
        heads: HV.
        scale: factor of the queries, ``K ** -0.5`` by default.
        normalize: whether to divide both by their norm first.
    """
    if normalize:
        q, k = normalized(q), normalized(k)
    q = q * (scale or k.shape[-1] ** -0.5)
    if k.shape[1] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    return q, k


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Run the new tokens of several sequences, each from the state in its slot.

    Args:
        q, k: ``[1, tokens, H, K]``; v: ``[1, tokens, HV, V]``; g, beta: fp32 ``[1, tokens, HV]``.
        initial_state: the pool ``[slots, HV, V, K]``; updated in place if ``inplace_update``.
        initial_state_indices: slot of each sequence, ``[N]``; negative for padding.
        cu_seqlens: first token of each sequence, then the end, ``[N + 1]``.
        scale: factor of the queries, ``K ** -0.5`` by default.
        head_first: must be False.

    Returns:
        Outputs, the shape of ``v`` and the dtype of ``q``; None; and the states from which prefixes are
        tracked: at the start of every chunk of 64 tokens, sequence by sequence, fp32
        ``[1, chunks, HV, V, K]``.
    """
    assert not head_first and q.shape[0] == 1
    layout = _layout(tuple(cu_seqlens.tolist()))

    def by_chunk(x: Tensor) -> Tensor:
        """``[tokens, heads, ...]`` to ``[chunks, heads, C, ...]``."""
        return x[layout.tokens].transpose(1, 2)

    q32, k32 = per_value_head(q[0].float(), k[0].float(), v.shape[2], scale=scale, normalize=use_qk_l2norm_in_kernel)
    # A repeated token neither decays the state nor writes to it.
    gates = (torch.where(layout.valid, x[0].float()[layout.tokens], 0).transpose(1, 2) for x in (g, beta))
    blocks = prepare(by_chunk(q32), by_chunk(k32), by_chunk(v[0].float()), *gates)

    slots = live_slots(initial_state_indices)[layout.sequences]
    state = initial_state.index_select(0, slots).float()
    starts = state.new_empty(len(layout.tokens), *state.shape[1:])
    outputs = torch.empty_like(blocks.values)
    for step in layout.steps:
        active = state[: step.stop - step.start]
        starts[step] = active
        block = blocks.rows(step)
        outputs[step], writes = apply(block, active)
        active.copy_(last_state(block, active, writes))
    if inplace_update:
        initial_state.index_copy_(0, slots, state.to(initial_state.dtype))
    out = outputs.transpose(1, 2).flatten(0, 1).index_select(0, layout.positions)
    return out.unsqueeze(0).to(q.dtype), None, starts[layout.sequence_major].unsqueeze(0)
