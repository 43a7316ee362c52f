"""Accept: the target's own tokens, and which drafts agree with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.ops import Accepted, accept_block
from sglang_dflash.upstream import GrammarTree, SpecTpSync, SpecTpSyncSite, build_grammar_vocab_mask
from sglang_dflash.worker.observe.traced import traced
from sglang_dflash.worker.sampling.sampler import TargetSampler
from sglang_dflash.worker.step import Step


class Acceptance:
    """Chooses the target's token at every block position; the drafts that agree with it are accepted.

    Args:
        runner: the target's ``ModelRunner``.
        tp_group: ranks that serve the same batch; they must commit the same tokens.
    """

    def __init__(self, runner: Any, tp_group: Any) -> None:
        self._sampler = TargetSampler(runner)
        self._sync = SpecTpSync(tp_group)

    def before_prefill(self, batch: Any) -> None:
        """Before the target's prefill, in which SGLang samples the next token."""
        self._sampler.before_prefill(batch)

    def after_prefill(self, batch: Any, next_token_ids: Tensor) -> None:
        """After it: make all ranks agree on the token of each request, int64 [bs], in place."""
        self._sync.sync(SpecTpSyncSite.DFLASH_TARGET, next_token_ids)
        self._sampler.after_prefill(batch, next_token_ids)

    def before_verify(self, batch: Any, tokens: Tensor) -> None:
        """Before the target's forward over the block, int64 [bs, w]."""
        self._sampler.before_verify(batch, tokens)

    @traced("dflash.accept")
    def __call__(self, batch: Any, step: Step, tokens: Tensor, logits_output: Any, grammar_mask: Any) -> Accepted:
        """Accept drafts.

        Args:
            batch: the ``ScheduleBatch``; ``seq_lens`` holds the committed lengths.
            step: the block's positions.
            tokens: int64 [bs, w], the verified block.
            logits_output: the target's logits [bs * w, V] after every block position, used up; takes the
                log-probabilities that the requests ask for.
            grammar_mask: the tokens that the requests' grammars allow in each of those rows, or None.
        """
        positions = step.block.positions
        target_tokens = self._sampler.choose(batch, logits_output, tokens, positions, grammar_mask)
        self._sync.sync(SpecTpSyncSite.DFLASH_TARGET, target_tokens)
        accepted = accept_block(tokens, target_tokens, batch.seq_lens)
        self._sampler.commit(batch, accepted)
        return accepted


def grammar_tree(batch: Any, tokens: Tensor) -> Any:
    """The block (int64 [bs, w]) on its way to the host, where the grammars walk it; None if no request has a grammar.

    Called before the target's forward, so that the copy is done when :func:`grammar_mask` needs it.
    """
    return GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None


def grammar_mask(batch: Any, tree: Any, device: torch.device, grammar_barrier: Callable[[], None] | None) -> Any:
    """The tokens that the grammars allow after every block position, built while the target's forward runs.

    Args:
        tree: what :func:`grammar_tree` returned.
        grammar_barrier: brings the grammars up to the last step's tokens (overlap scheduling).
    """
    if tree is None:
        return None
    return build_grammar_vocab_mask(
        reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=device, barrier=grammar_barrier
    )
