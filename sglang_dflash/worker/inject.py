"""Inject: the target's hidden states become the drafter's context K/V."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.upstream import KVWriteLoc, async_h2d, draft_tp_context
from sglang_dflash.worker.step import Step
from sglang_dflash.worker.window import DraftRings

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, ScheduleBatch

# Long prompts are projected in pieces of this many tokens. No memory budget counts the workspace, so it must stay
# small; a piece this long already fills a GPU.
CHUNK = 2048

# Plain decoding steps whose tokens are injected together, at most.
MOST_WAITING = 16


class Inject:
    """Writes context K/V into the drafter's KV pool.

    Without a draft window one slot number serves both pools, so whatever shares a prefix's slots (the radix
    cache) shares the drafter's K/V too. With one, each request has a ring of its own slots.

    Args:
        runner: the drafter's.
        layout: the parallel layout that the drafter was built for.
        rings: the drafter's slots under a draft window.
        defers: whether plainly decoded tokens may wait. Disable when another component may overwrite the slots: on a
            decoding server the transfer of the next request writes freed slots.
    """

    def __init__(self, runner: ModelRunner, layout: Any, rings: DraftRings | None, *, defers: bool = True) -> None:
        self._runner, self._layout, self._rings, self._defers = runner, layout, rings, defers
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._waiting_for: list[str] = []

    def __call__(self, step: Step) -> None:
        """Inject a verified block.

        Every verified position is written, accepted or not. The slots after the accepted ones belong to the request
        alone, and the next block overwrites each of them before anything reads it. So no mask is needed, and nothing
        here waits for the accept length.

        A plainly decoded token may wait for :meth:`catch_up`: nothing reads it before the drafter runs, and many
        tokens cost hardly more than one.
        """
        positions, slots = step.positions, self._slots(step.draft_kv.plan)
        hidden = step.verified.logits_output.hidden_states[: len(positions)]
        if step.width > 1 or not self._defers:
            self.write(hidden, None, positions, slots)
            return
        rids = [req.rid for req in step.batch.reqs]
        if rids != self._waiting_for or len(self._waiting) == MOST_WAITING:
            self.catch_up()
        # A graph owns the memory of its result.
        self._waiting.append((hidden.clone(), positions, slots))
        self._waiting_for = rids

    def catch_up(self) -> bool:
        """Inject the tokens that wait: before the drafter reads, and before a slot may belong to another request.

        They belong to the same requests, each step one position further, so no slot is written twice.

        Returns:
            whether there were any.
        """
        if not self._waiting:
            return False
        hidden, positions, slots = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        self.write(hidden, None, positions, slots)
        return True

    def prefill(self, batch: ScheduleBatch, hidden: Tensor, kv_loc_plan: Any) -> None:
        """Inject the tokens of a target extend: ``hidden`` [T, K * H], requests back to back."""
        self.catch_up()
        if self._rings is not None:
            self.write(hidden, *self._rings.prefill(batch))
            return
        lens = async_h2d([batch.prefix_lens, batch.extend_lens], dtype=torch.int64, device=hidden.device)
        prefix, extend = lens
        total = sum(batch.extend_lens)
        # Position of the first token, minus its index in the batch, per request.
        shift = prefix - (extend.cumsum(0) - extend)
        positions = shift.repeat_interleave(extend, output_size=total) + torch.arange(total, device=hidden.device)
        self.write(hidden, None, positions, self._slots(kv_loc_plan))

    def _slots(self, kv_loc_plan: Any) -> Tensor:
        slots: Tensor = kv_loc_plan.write_ids(self._runner.kv_index_translator)
        return slots

    def write(self, hidden: Tensor, rows: Tensor | None, positions: Tensor, slots: Tensor) -> None:
        """Write context K/V.

        Args:
            hidden: [N, K * H], the target's.
            rows: int64 [T], tokens of ``hidden``; None for its first T.
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
