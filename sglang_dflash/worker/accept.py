"""Accept: which drafts stand, and the target's own token behind them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.ops import Accepted, accept_block
from sglang_dflash.upstream import SpecTpSync, SpecTpSyncSite


class Acceptance:
    """Chooses the target's token at every block position; the drafts that agree with it are accepted.

    Args:
        tp_group: ranks that serve the same batch; they must commit the same tokens.
    """

    def __init__(self, tp_group: Any) -> None:
        self._sync = SpecTpSync(tp_group)

    def prefill(self, next_token_ids: Tensor) -> None:
        """Make all ranks agree on the token that a prefill sampled, int64 [bs], in place."""
        self._sync.sync(SpecTpSyncSite.DFLASH_TARGET, next_token_ids)

    def __call__(self, batch: Any, tokens: Tensor, logits: Tensor) -> Accepted:
        """Accept drafts.

        Args:
            batch: the ``ScheduleBatch``; ``seq_lens`` holds the committed lengths.
            tokens: int64 [bs, w], the verified block.
            logits: [bs * w, V], the target's logits after every block position, adjusted for the requests.
        """
        target_tokens = logits.argmax(dim=-1).view(tokens.shape)
        self._sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, target_tokens)
        return accept_block(tokens, target_tokens, batch.seq_lens)
