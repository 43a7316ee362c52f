"""One decode step as data. Each stage of the worker fills fields for later stages and features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from sglang_dflash.ops import Accepted
from sglang_dflash.step.draft_state import DraftState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

Publish = Callable[[Tensor], None]  # receives the committed lengths after a step, int64 [bs]
GrammarBarrier = Callable[[], None]


@dataclass(frozen=True)
class BlockKV:
    """KV slots and lengths of a block in the pool of the target or the drafter.

    Attributes:
        seq_lens: int64 [bs], context tokens before the block.
        slots: int64 [bs * w].
        host_lens: [bs] on the host, lengths of context and block; upper bounds unless ``lens_are_exact``.
        host_tokens: the sum of ``host_lens``.
        plan: SGLang's plan of these slots.
    """

    width: int
    seq_lens: Tensor
    slots: Tensor
    host_lens: Tensor
    host_tokens: int
    lens_are_exact: bool
    plan: Any = None

    def planned(self, translator: Any, rows: Tensor) -> BlockKV:
        plan = translator.plan(
            req_pool_indices=rows,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.host_lens,
            write_virtual=self.slots,
            read_extent=self.width,
        )
        return replace(self, plan=plan)

    def first(self, width: int, translator: Any, rows: Tensor) -> BlockKV:
        slots = self.slots.view(-1, self.width)[:, :width].flatten()
        less = self.width - width
        lens, tokens = self.host_lens - less, self.host_tokens - less * len(self.host_lens)
        kept = replace(self, width=width, slots=slots, host_lens=lens, host_tokens=tokens)
        return kept.planned(translator, rows)


@dataclass
class Step:
    """A block per request, from layout to commit: ``bs`` requests, ``w`` positions each.

    Attributes:
        batch: the scheduler's; ``seq_lens`` holds the committed lengths before the step.
        grammar_barrier: commits the previous step's tokens to the grammars; None without overlap.
        tokens: int64 [bs, w], anchor and mask tokens; *draft* replaces the mask tokens.
        target_kv, draft_kv: the block in each model's pool; they differ under a draft window only.
        margins: float32 [bs, w - 1], drafts' logit margins if blocks are copied.
        grammar_tree: the drafts on the host.
        state_slots: [bs], slots of recurrent states, or None. They are copied because the scheduler may end a request
            before the commit and reuse its row.
        track_every: tokens between track boundaries if a request may cross one, else 0.
        caught_up: whether the draft also injected tokens of plain steps.
        planned: SGLang's batch of the verify, if it was planned before the draft.
        verified: SGLang's result, with logits [bs * w, V] and hidden states [bs * w, K * H].
        accepted: the tokens that the step commits.
    """

    batch: ScheduleBatch
    state: DraftState
    width: int
    grammar_barrier: GrammarBarrier | None
    positions: Tensor
    tokens: Tensor
    target_kv: BlockKV
    draft_kv: BlockKV
    margins: Tensor | None = None
    grammar_tree: Any = None
    state_slots: Tensor | None = None
    track_every: int = 0
    caught_up: bool = False
    planned: Any = None
    verified: Any = field(init=False)
    accepted: Accepted = field(init=False)

    def first(self, width: int, translator: Any) -> Step:
        return replace(
            self,
            width=width,
            positions=self.positions.view(-1, self.width)[:, :width].flatten(),
            tokens=self.tokens[:, :width],
            draft_kv=self.draft_kv.first(width, translator, self.batch.req_pool_indices),
        )

    def result(self, *, counted: bool) -> GenerationBatchResult:
        """Return SGLang's result of the step. With ``counted`` SGLang counts verified positions, as widths differ."""
        accepted = self.accepted
        widths = constant(len(self.tokens), self.width, accepted.bonus.device) if counted else None
        return GenerationBatchResult(
            logits_output=self.verified.logits_output,
            next_token_ids=accepted.out_tokens.flatten(),
            accept_lens=accepted.accept_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DraftState(accepted.bonus, accepted.new_seq_lens, self.width),
            speculative_num_draft_tokens=self.width,
            cap_lens=widths,
            can_run_cuda_graph=self.verified.can_run_cuda_graph,
            routed_experts_output=self.verified.routed_experts_output,
            indexer_topk_output=self.verified.indexer_topk_output,
        )


@cache
def constant(rows: int, value: int, device: torch.device) -> Tensor:
    """Return a shared int64 [rows] tensor. Do not write it."""
    return torch.full((rows,), value, device=device)


def idle_result(batch: ScheduleBatch, block: int) -> GenerationBatchResult:
    none = torch.empty(0, dtype=torch.int64, device=batch.seq_lens.device)
    return GenerationBatchResult(
        next_token_ids=none,
        accept_lens=none.int(),
        new_seq_lens=none,
        next_draft_input=DraftState(none, none, block),
        speculative_num_draft_tokens=block,
    )
