"""Exact verify and commit of the gated delta net: plain decoding's own kernel, launched once per position.

SGLang's packed decode kernel advances a state by one token, in place. The verify runs it on copies of the states. The
commit runs it again over the accepted tokens. Row 0 of the copies is scratch memory for skipped rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from torch import Tensor

from sglang_dflash.states import verify
from sglang_dflash.states.commit import RecurrentCommit
from sglang_dflash.states.reference import Records
from sglang_dflash.states.replay import pool_records

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_dflash.step.step import Step

ALIGNMENT = 16  # bytes, of every tensor that plain decoding passes to its kernels
SCRATCH_BYTES = 512 << 20  # most bytes of a commit's copies of states
Gates = tuple[Tensor, Tensor]  # A_log and dt_bias of a layer
Targets = Sequence[tuple[Tensor, Tensor]]  # slots, and the tokens after which states are written there


def step_verify(inputs: verify.Inputs, cache: Any, forward_batch: Any) -> Tensor:
    """Run a block of one layer, a rule of :mod:`sglang_dflash.states.verify`; the states do not change.

    Record the inputs for :func:`step_commit`: raw keys and values, a and b.
    """
    q, k, v, a, b, A_log, dt_bias, states, slots = inputs
    width, bs, (H, K), (HV, V) = forward_batch.spec_info.draft_token_num, len(slots), q.shape[1:], v.shape[1:]
    requests = torch.where(slots >= 0, forward_batch.req_pool_indices[:bs], 0).long()  # row 0 for padding
    for ring, x in zip(_rings(pool_records(cache)), (k, v, a, b), strict=True):
        by_head = x.unflatten(0, (bs, width)).transpose(1, 2)
        ring.narrow(2, 0, width).index_copy_(0, requests, by_head.to(ring.dtype))
    scratch = states.index_select(0, torch.cat([slots.new_zeros(1), slots.clamp(min=0)]))
    mixed = q.new_empty(width, bs, 2 * H * K + HV * V)
    for part, x in zip(mixed.split([H * K, H * K, HV * V], -1), (q, k, v), strict=True):
        part.unflatten(-1, x.shape[1:]).copy_(x.unflatten(0, (bs, width)).transpose(0, 1))
    a, b = (by_position(x.unflatten(0, (bs, width)).transpose(0, 1), x.dtype) for x in (a, b))
    outputs, rows = q.new_empty(width, bs, 1, HV, V), _rows_of(slots >= 0)
    for t in range(width):
        _advance(mixed[t], a[t], b[t], (A_log, dt_bias), scratch, rows, outputs[t], K**-0.5)
    return outputs.transpose(0, 1).reshape(bs * width, HV, V)


HOOKS = verify.hooks(step_verify)


class SteppedCommit(RecurrentCommit):
    """Repeats plain decoding's steps over the accepted tokens of a replay."""

    compiles_every_batch = True  # step_commit divides by 2 or more

    def __init__(self, target_worker: TpModelWorker) -> None:
        super().__init__(target_worker)
        self._gates = gates_of(target_worker.model_runner.model)

    def replay(self, step: Step, track: Tensor | None) -> None:
        states, accepted, slots = self._requests.mamba_pool.mamba_cache, step.accepted, step.state_slots
        assert slots is not None
        targets = [(slots, accepted.accept_lens)]
        if track is not None:
            targets.append((track, accepted.counts[1]))
        rows, records = step.batch.req_pool_indices, pool_records(states)
        step_commit(states.temporal, records, self._gates, rows, slots, targets, step.width)


def step_commit(
    states: Tensor, records: Records, gates: Sequence[Gates], rows: Tensor, slots: Tensor, targets: Targets, width: int
) -> None:
    """Advance every request's state, in all layers, by its first tokens of the last block of ``width``.

    Arguments as in ``reference.gdn_commit``, with records of :func:`step_verify`.
    """
    starts, rows = slots.repeat(len(targets)), rows.repeat(len(targets))
    ends, counts = (torch.cat([each.long() for each in part]) for part in zip(*targets, strict=True))
    live = starts >= 0
    ends = torch.where(live & (counts > 0), ends, 0).clamp_(min=0)
    starts = torch.cat([starts.new_zeros(1), starts.clamp(min=0)])
    layers_at_once = len(states)  # a divisor, because each number is another compilation
    while layers_at_once > max(1, SCRATCH_BYTES // (len(starts) * states[0, 0].nbytes)):
        layers_at_once //= next(divisor for divisor in range(2, layers_at_once + 1) if layers_at_once % divisor == 0)
    for first in range(0, len(states), layers_at_once):
        part = slice(first, first + layers_at_once)
        pool = states[part]
        scratch = pool.transpose(0, 1).index_select(0, starts).flatten(1, 2)
        # per position, with the heads of all layers side by side
        k, v, a, b = (
            ring[part].index_select(1, rows).narrow(3, 0, width).permute(3, 1, 0, 2, *range(4, ring.dim())).flatten(2)
            for ring in _rings(records)
        )
        mixed = torch.cat([k, k, v], -1)  # keys replace the queries, as outputs are not read
        a, b = by_position(a, k.dtype), by_position(b, b.dtype)
        A_log, dt_bias = (torch.cat(each) for each in zip(*gates[part], strict=True))
        unread = mixed.new_empty(len(rows), 1, *scratch.shape[1:3])
        for t in range(width):
            _advance(mixed[t], a[t], b[t], (A_log, dt_bias), scratch, _rows_of(live & (counts > t)), unread)
        pool.index_copy_(1, ends, scratch[1:].unflatten(1, (len(pool), -1)).transpose(0, 1))


def _rings(records: Records) -> tuple[Tensor, ...]:
    # rings of keys, values, a and b
    assert records.updates_low is not None
    return records.keys, records.updates, records.decays, records.updates_low.select(-1, 0)


def by_position(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``x`` ``[width, rows, heads]``. Each position's rows are dense and begin at a multiple of 16 bytes."""
    numbers = x[0].numel()
    memory = x.new_empty(len(x), -(-numbers // 16) * 16, dtype=dtype)
    return memory[:, :numbers].unflatten(1, x.shape[1:]).copy_(x)


def _rows_of(live: Tensor) -> Tensor:
    # rows of the copies, int32 [n]; a kernel skips negative ones
    return torch.where(live, torch.arange(1, len(live) + 1, device=live.device), -1).int()


def _advance(
    mixed: Tensor, a: Tensor, b: Tensor, gates: Gates, scratch: Tensor, rows: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    # Triton compiles by address and stride. Another layout than plain decoding's would round sums differently.
    for x in (mixed, a, b, scratch, rows, out):
        assert x.data_ptr() % ALIGNMENT == 0 and x.stride(0) == x[0].numel(), (x.data_ptr(), x.shape, x.stride())
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, *gates, scale, scratch, out, rows, use_qk_l2norm_in_kernel=True
    )


def gates_of(model: torch.nn.Module) -> list[Gates]:
    """Return A_log and dt_bias of each recurrent layer, in the pool's order."""
    layers = [each for each in model.modules() if isinstance(each, RadixLinearAttention)]
    return [(each.A_log, each.dt_bias) for each in sorted(layers, key=lambda each: each.layer_id)]
