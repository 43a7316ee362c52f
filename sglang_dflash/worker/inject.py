"""Inject: project the target's hidden states to the drafter's context K/V."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.upstream import KVWriteLoc, async_h2d, draft_tp_context
from sglang_dflash.worker.step import Step
from sglang_dflash.worker.window import DraftRings

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, ScheduleBatch

# Chunk long prompts: the workspace is not budgeted, and 2,048 tokens already saturate a GPU.
CHUNK = 2048

# Most plain decoding steps whose tokens are injected together.
MAX_PENDING = 16


class Inject:
    """Writes context K/V into the drafter's KV pool.

    Without a draft window both pools use the same slot numbers, so requests that share a prefix in the radix cache
    share the drafter's K/V too. With a window, each request has a ring of slots.

    Args:
        runner: the drafter's.
        layout: the drafter's parallel layout.
        rings: the drafter's KV slots under a draft window.
        defers: whether plainly decoded tokens may wait for :meth:`catch_up`. Disable it when another component may
            write freed slots: on a decoding server the transfer of the next request does.
    """

    def __init__(self, runner: ModelRunner, layout: Any, rings: DraftRings | None, *, defers: bool = True) -> None:
        self._runner, self._layout, self._rings, self._defers = runner, layout, rings, defers
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._pending_rids: list[str] = []

    def __call__(self, step: Step) -> None:
        """Inject a verified block.

        Write every verified position, accepted or not: only this request owns the slots after the accepted ones, and
        the next block overwrites them before they are read. So the accept length is not needed here.

        A plainly decoded token may wait for :meth:`catch_up`: only the drafter reads it, and injecting many tokens
        costs hardly more than one.
        """
        positions, slots = step.positions, self._slots(step.draft_kv.plan)
        hidden = step.verified.logits_output.hidden_states[: len(positions)]
        if step.width > 1 or not self._defers:
            self.write(hidden, None, positions, slots)
            return
        rids = [req.rid for req in step.batch.reqs]
        if rids != self._pending_rids or len(self._pending) == MAX_PENDING:
            self.catch_up()
        # A graph overwrites its outputs at the next replay.
        self._pending.append((hidden.clone(), positions, slots))
        self._pending_rids = rids

    def catch_up(self) -> bool:
        """Inject pending tokens, before the drafter reads them and before their slots may change owner.

        They belong to the same requests, one position further per step, so no slot is written twice.

        Returns:
            whether any were pending.
        """
        if not self._pending:
            return False
        hidden, positions, slots = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        self._pending.clear()
        self.write(hidden, None, positions, slots)
        return True

    def prefill(self, batch: ScheduleBatch, hidden: Tensor, kv_loc_plan: Any) -> None:
        """Inject the tokens of a target extend: ``hidden`` [T, K * H], requests concatenated."""
        self.catch_up()
        if self._rings is not None:
            self.write(hidden, *self._rings.prefill(batch))
            return
        lens = async_h2d([batch.prefix_lens, batch.extend_lens], dtype=torch.int64, device=hidden.device)
        prefix, extend = lens
        total = sum(batch.extend_lens)
        # Per request: position of its first token minus that token's index in the batch.
        shift = prefix - (extend.cumsum(0) - extend)
        positions = shift.repeat_interleave(extend, output_size=total) + torch.arange(total, device=hidden.device)
        self.write(hidden, None, positions, self._slots(kv_loc_plan))

    def _slots(self, kv_loc_plan: Any) -> Tensor:
        slots: Tensor = kv_loc_plan.write_ids(self._runner.kv_index_translator)
        return slots

    def write(self, hidden: Tensor, rows: Tensor | None, positions: Tensor, slots: Tensor) -> None:
        """Write context K/V.

        Args:
            hidden: [N, K * H], hidden states of the target.
            rows: int64 [T], rows of ``hidden`` to write; None for its first T.
            positions: int64 [T], absolute positions.
            slots: int64 [T], slots of the drafter's pool.
        """
        pool, model = self._runner.token_to_kv_pool, self._runner.model
        with draft_tp_context(self._layout):
            for start in range(0, positions.shape[0], CHUNK):
                piece = slice(start, min(start + CHUNK, positions.shape[0]))
                keys, values = model.context_kv(hidden[piece if rows is None else rows[piece]], positions[piece])
                where = KVWriteLoc(slots[piece], physical=True)
                for layer, k, v in zip(model.attention_layers(), keys, values, strict=True):
                    pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
