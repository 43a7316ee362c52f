"""Verify logits of tensor-parallel ranks: gathered as pairs for greedy batches, whole only if a request needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.ops import argmax
from sglang_dflash.upstream.worker import LogitsProcessor, get_parallel

if TYPE_CHECKING:
    from sglang_dflash.model.vocabulary import TargetVocabulary
    from sglang_dflash.upstream.worker import ModelRunner


class LogitShards:
    """Keeps the logits of a verify on the rank that computed them, one shard of the vocabulary per rank.

    Plain decoding and prefills gather as before. Build it before the target's graphs are captured.

    Args:
        vocabulary: the target's, with this rank's shard of the LM head.
    """

    def __init__(self, target: ModelRunner, vocabulary: TargetVocabulary) -> None:
        self._vocabulary = vocabulary
        processors = [module for module in target.model.modules() if isinstance(module, LogitsProcessor)]
        self._processor = processors[0] if len(processors) == 1 and _gathers_plainly(processors[0]) else None
        if self._processor is not None:
            precise = self._processor.use_fp32_lm_head or self._processor.use_fp32_lm_head_output
            self._dtype = torch.float32 if precise else target.dtype
            _keep_shards(self._processor)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the argmax of each row, int64 [n], from shards [n, V / ranks] or whole ``logits`` [n, V]."""
        if not self._are_shards(logits):
            return argmax(logits)
        # Columns after the shard's ids are padding.
        return self._vocabulary.argmax_of_shard(logits[:, : self._vocabulary.num_ids])[0]

    def whole(self, logits: Tensor) -> Tensor:
        """Return all logits, float32 [n, V], as SGLang does without shards."""
        if not self._are_shards(logits):
            return logits
        assert self._processor is not None
        # The model computed them in its own dtype, so the ranks send no more than SGLang's would.
        gathered: Tensor = self._processor._logits_gatherer(logits.to(self._dtype))
        return gathered[:, : self._processor.vocab_size].float()

    def _are_shards(self, logits: Tensor) -> bool:
        return self._processor is not None and logits.shape[-1] < self._processor.vocab_size


def _gathers_plainly(processor: Any) -> bool:
    # A soft cap rounds after the gather, so equal capped logits may differ before it.
    others = processor.use_attn_tp_group, processor.use_tp_lm_head_all_to_all, processor.final_logit_softcapping
    return get_parallel().tp_size > 1 and processor.do_tensor_parallel_all_gather and not any(others)


def _keep_shards(processor: Any) -> None:
    get_logits = processor._get_logits

    def with_shards(hidden_states: Tensor, lm_head: Any, logits_metadata: Any, *args: Any, **kwargs: Any) -> Tensor:
        processor.do_tensor_parallel_all_gather = not logits_metadata.forward_mode.is_target_verify()
        try:
            logits: Tensor = get_logits(hidden_states, lm_head, logits_metadata, *args, **kwargs)
        finally:
            processor.do_tensor_parallel_all_gather = True
        return logits

    processor._get_logits = with_shards
