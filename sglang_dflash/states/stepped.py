"""Exact verify and commit of the gated delta net: plain decoding's own kernel, launched once per position.

SGLang's packed decode kernel advances a state by one token, in place: in a verify on copies of the states, in a
replay's commit over the accepted tokens. Scratch row 0 belongs to no request: the CPU platform writes skipped rows
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_dflash.states.reference import Records
from sglang_dflash.upstream.worker import RadixLinearAttention, fused_recurrent_gated_delta_rule_packed_decode

ALIGNMENT = 16  # bytes, of every tensor that plain decoding hands to its kernels
SCRATCH_BYTES = 512 << 20  # of a commit's copies of states
_Keep = Callable[[int, Tensor], None]


def step_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    *,
    width: int,
    scale: float,
    keep: _Keep | None = None,
) -> Tensor:
    """Run ``width`` tokens of every request, as ``reference.gdn_verify`` does; the states do not change.

    ``keep(t, after)`` receives the states after position t, ``[bs, HV, V, K]`` in the pool's dtype, until the next
    position.
    """
    bs, (H, K), (HV, V) = len(slots), q.shape[1:], v.shape[1:]
    scratch = states.index_select(0, torch.cat([slots.new_zeros(1), slots.clamp(min=0)]))
    mixed = q.new_empty(width, bs, 2 * H * K + HV * V)
    for part, x in zip(mixed.split([H * K, H * K, HV * V], -1), (q, k, v), strict=True):
        part.unflatten(-1, x.shape[1:]).copy_(x.unflatten(0, (bs, width)).transpose(0, 1))
    a, b = (by_position(x.unflatten(0, (bs, width)).transpose(0, 1), x.dtype) for x in (a, b))
    outputs = q.new_empty(width, bs, 1, HV, V)
    rows = _rows_of(slots >= 0)
    for t in range(width):
        _advance(mixed[t], a[t], b[t], A_log, dt_bias, scratch, rows, scale=scale, out=outputs[t])
        if keep is not None:
            keep(t, scratch[1:])
    return outputs.transpose(0, 1).reshape(bs * width, HV, V)


def record(records: Records, rows: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, width: int) -> None:
    """Record the inputs of :func:`step_commit` in one layer's ``records``: raw keys and values, a and b.

    ``rows`` are the requests' in the records, ``[bs]``, row 0 for padding. b is in the first lane of ``updates_low``.
    """
    assert records.updates_low is not None
    for ring, x in (
        (records.updates, v),
        (records.keys, k),
        (records.decays, a),
        (records.updates_low.select(-1, 0), b),
    ):
        by_head = x.unflatten(0, (len(rows), width)).transpose(1, 2)
        ring.narrow(2, 0, width).index_copy_(0, rows, by_head.to(ring.dtype))


def step_commit(
    states: Tensor,
    records: Records,
    gates: Sequence[tuple[Tensor, Tensor]],
    rows: Tensor,
    slots: Tensor,
    counts: Tensor,
    track_slots: Tensor | None = None,
    track_counts: Tensor | None = None,
    *,
    width: int,
) -> None:
    """Advance every request's state, in all layers, by its first ``counts`` tokens of the last block of ``width``.

    Arguments as in ``reference.gdn_commit``, with records of :func:`record` and each layer's A_log and dt_bias.
    """
    starts, targets = slots, [(slots, counts)]
    if track_slots is not None and track_counts is not None:  # also from the state before the block
        starts, rows = slots.repeat(2), rows.repeat(2)
        targets.append((track_slots, track_counts))
    ends, counts = (torch.cat([each.long() for each in part]) for part in zip(*targets, strict=True))
    live = starts >= 0
    ends = torch.where(live & (counts > 0), ends, 0).clamp_(min=0)
    starts = torch.cat([starts.new_zeros(1), starts.clamp(min=0)])
    layers_at_once = len(states)  # one of few divisors, because each is another compilation
    while layers_at_once > max(1, SCRATCH_BYTES // (len(starts) * states[0, 0].nbytes)):
        layers_at_once //= next(divisor for divisor in range(2, layers_at_once + 1) if layers_at_once % divisor == 0)
    for first in range(0, len(states), layers_at_once):
        part = slice(first, first + layers_at_once)
        pool, of_layers = states[part], Records(*(x[part] for x in records.parts))
        scratch = pool.transpose(0, 1).index_select(0, starts).flatten(1, 2)
        mixed, a, b = _recorded(of_layers, rows, width)
        A_log, dt_bias = (torch.cat(each) for each in zip(*gates[part], strict=True))
        unread = mixed.new_empty(len(rows), 1, *scratch.shape[1:3])
        for t in range(width):
            _advance(mixed[t], a[t], b[t], A_log, dt_bias, scratch, _rows_of(live & (counts > t)), out=unread)
        pool.index_copy_(1, ends, scratch[1:].unflatten(1, (len(pool), -1)).transpose(0, 1))


def _recorded(records: Records, rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    # Per position, with the heads of all layers side by side; keys replace the queries, as outputs are not read.
    assert records.updates_low is not None
    rings = records.keys, records.updates, records.decays, records.updates_low.select(-1, 0)
    k, v, a, b = (
        x.index_select(1, rows).narrow(3, 0, width).permute(3, 1, 0, 2, *range(4, x.dim())).flatten(2) for x in rings
    )
    return torch.cat([k, k, v], -1), by_position(a, k.dtype), by_position(b, b.dtype)


def by_position(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``x`` ``[width, rows, heads]``. Each position's rows are dense and begin at a multiple of 16 bytes."""
    numbers = x[0].numel()
    memory = x.new_empty(len(x), -(-numbers // 16) * 16, dtype=dtype)
    return memory[:, :numbers].unflatten(1, x.shape[1:]).copy_(x)


def _rows_of(live: Tensor) -> Tensor:
    # row in the scratch, int32 [n], negative to skip it
    return torch.where(live, torch.arange(1, len(live) + 1, device=live.device), -1).int()


def _advance(
    mixed: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scratch: Tensor, rows: Tensor, *, out: Tensor,
    scale: float = 1.0,
) -> None:  # fmt: skip
    # Triton compiles by address and stride, and another layout rounds sums differently: as in plain decoding
    for x in (mixed, a, b, scratch, rows, out):
        assert x.data_ptr() % ALIGNMENT == 0 and x.stride(0) == x[0].numel(), (x.data_ptr(), x.shape, x.stride())
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, A_log, dt_bias, scale, scratch, out, rows, use_qk_l2norm_in_kernel=True
    )


def gates_of(model: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return A_log and dt_bias of each recurrent layer, in the pool's order."""
    layers = [each for each in model.modules() if isinstance(each, RadixLinearAttention)]
    return [(each.A_log, each.dt_bias) for each in sorted(layers, key=lambda each: each.layer_id)]
