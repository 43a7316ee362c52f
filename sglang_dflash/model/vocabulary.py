"""The target's embedding and LM head, which the drafter shares, and the shards of its logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (
    _weak_ref_if_tensor as weak_ref,
)
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError
from sglang_dflash.ops import Noise, leading_tokens, likeliest_tokens, linear, walk_candidates

CANDIDATES = 16  # an unsure draft of a sampled request is drawn from so many


@dataclass(frozen=True)
class TargetVocabulary:
    """Map token ids to embeddings, and hidden states to the tokens of the largest logits.

    It is no module, so that the target's weights do not become the drafter's parameters. Scale and cap do not change
    which token is largest. They change margins and probabilities, so they are applied there.

    Attributes:
        embedding, lm_head: the target's, vocabulary-parallel.
        first_id, num_ids: token ids of this rank's shard of the head, without padding and added vocabulary.
        mask_embedding: [H]; None for the target's row.
        logit_scale: positive scale of the logits.
        logit_cap: soft cap of the scaled logits, ``cap * tanh(logit / cap)``, or None.
        allowed_ids: bool [num_ids], the ids that may be drafted; None for all.
    """

    embedding: Any
    lm_head: Any
    scale: float
    first_id: int
    num_ids: int
    mask_token_id: int
    mask_embedding: Tensor | None
    logit_scale: float
    logit_cap: float | None
    allowed_ids: Tensor | None = None

    @classmethod
    def of(cls, target: Any, drafter: DrafterConfig, mask_embedding: Tensor | None) -> TargetVocabulary:
        """Return a target model's vocabulary; DFlashError without an LM head, or if this rank's shard is empty."""
        lm_head = unwrap_lora_layer(getattr(target, "lm_head", None))
        if lm_head is None:
            raise DFlashError(
                f"the target {type(target).__name__} exposes no lm_head", remedy="serve this target without DFLASH"
            )
        shard = getattr(lm_head, "shard_indices", None)
        num_ids = lm_head.weight.shape[0] if shard is None else shard.num_org_elements
        if num_ids == 0:
            raise DFlashError("a tensor-parallel rank holds no rows of the LM head", remedy="lower --tp-size")
        find = target.get_input_embeddings  # MiniMax-M2's takes token ids and embeds them
        embedding = unwrap_lora_layer(target.model.embed_tokens if signature(find).parameters else find())
        if mask_embedding is not None:
            mask_embedding = mask_embedding.to(embedding.weight)
        noise_scale = getattr(target, "get_dflash_noise_embedding_scale", lambda: 1.0)
        return cls(
            embedding,
            lm_head,
            scale=drafter.input_scale * float(noise_scale()),
            first_id=0 if shard is None else shard.org_vocab_start_index,
            num_ids=num_ids,
            mask_token_id=drafter.mask_token_id,
            mask_embedding=mask_embedding,
            logit_scale=drafter.output_scale,
            logit_cap=drafter.logit_cap,
        )

    def reduced(self, allowed_ids: Tensor) -> TargetVocabulary:
        """Return a vocabulary that drafts only the tokens marked in ``allowed_ids``, bool [vocabulary]."""
        # a view, so that updates reach it
        return replace(self, allowed_ids=allowed_ids[self.first_id : self.first_id + self.num_ids])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings [n, H] of token ids int64 [n]."""
        embeds = self.embedding(token_ids)
        if self.mask_embedding is not None:
            # writing it into the target's table would change a tied LM head
            embeds = torch.where((token_ids == self.mask_token_id)[:, None], self.mask_embedding, embeds)
        return embeds if self.scale == 1.0 else embeds * self.scale

    def likeliest(self, anchors: Tensor, hidden: Tensor, positions: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Choose a token at each position from the largest logits, by :func:`likeliest_tokens`: plain DFlash's head.

        Args:
            anchors, positions: int64 [bs], as for :func:`walk_candidates`.
            hidden: [bs, n, H], of the mask positions.

        Returns:
            int64 and float32 [bs, n], the tokens and the leads of the best over the second.
        """
        rows, shape = hidden.flatten(0, 1), (*hidden.shape[:2], -1)
        if not self._is_divided and self.logit_scale == 1.0 and self.logit_cap is None:
            return likeliest_tokens(self._shard_logits(rows).view(shape), CANDIDATES, positions, noise)
        logits, tokens = self.top_k(rows, CANDIDATES, noise)
        return walk_candidates(tokens.view(shape), logits.view(shape), anchors, positions, noise)

    def top_k(self, hidden: Tensor, k: int, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest scaled and capped logits per row of ``hidden`` [n, H], descending, float32 [n, k],
        and their tokens, int64 [n, k]; equal on all ranks. ``noise`` as for :func:`leading_tokens`."""
        logits, tokens = self.top_k_of_shard(self._shard_logits(hidden), k, noise)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap), tokens

    def top_k_of_shard(self, logits: Tensor, k: int, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
        """Return the result of :meth:`top_k` without scale and cap, from this rank's logits [n, num_ids]."""
        group = get_parallel().tp_group
        logits, tokens = leading_tokens(logits, min(k, self.num_ids), noise)
        if self._is_divided:
            # a stable sort orders equal logits alike on every rank; float32 holds token ids exactly up to 2**24
            sent = torch.stack((logits, (tokens + self.first_id).float()))
            logits, ids = group.all_gather(sent[None], dim=0).movedim(0, 2).flatten(2)
            logits, order = logits.sort(dim=1, descending=True, stable=True)
            logits, tokens = logits[:, :k].contiguous(), ids.gather(1, order[:, :k]).long()
        return logits, tokens

    @property
    def _is_divided(self) -> bool:
        # every rank holds all of Gemma 4's tied head, a plain embedding
        return get_parallel().tp_group.world_size > 1 and hasattr(self.lm_head, "shard_indices")

    def _shard_logits(self, hidden: Tensor) -> Tensor:
        weight = getattr(self.lm_head, "weight", None)  # AWQ's and GPTQ's heads have a packed qweight instead
        if weight is not None and weight.is_floating_point() and weight.itemsize > 1:
            logits = linear(hidden.to(weight.dtype), weight[: self.num_ids])
        else:
            # as the target computes its own logits; columns after the rank's ids are padding
            logits = self.lm_head.quant_method.apply(self.lm_head, hidden, None)[:, : self.num_ids]
        return logits if self.allowed_ids is None else logits.masked_fill(~self.allowed_ids, float("-inf"))


class LeavesLogits:
    """A mixin of SGLang's ``LogitsProcessor``. In a verify, and in a decode of width 1, it returns the LM head's logits
    without a conversion to float32. In a verify it does not gather ``sharded`` logits."""

    sharded: bool
    do_tensor_parallel_all_gather: bool
    final_logit_softcapping: float | None
    vocab_size: int

    def _get_logits(self, hidden_states: Tensor, lm_head: Any, logits_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        above, gathers = cast("Any", super()), self.do_tensor_parallel_all_gather
        if self.sharded and logits_metadata.forward_mode.is_target_verify():
            self.do_tensor_parallel_all_gather = False
        try:
            return above._get_logits(hidden_states, lm_head, logits_metadata, *args, **kwargs)
        finally:
            self.do_tensor_parallel_all_gather = gathers

    def _copy_logits_to_buffer(self, logits: Tensor, logits_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        above: Any = super()
        mode, narrow, capped = logits_metadata.forward_mode, logits.dtype != torch.float32, self.final_logit_softcapping
        if narrow and not capped and (mode.is_target_verify() or mode.is_decode()):
            return logits[:, : self.vocab_size]
        return above._copy_logits_to_buffer(logits, logits_metadata, *args, **kwargs)


class BlockLogits:
    """A block's logits in the LM head's dtype, on each rank its shard.

    SGLang converts logits to float32 in its graphs. The conversion is exact and preserves order and ties, so an argmax
    does not need it. A graph's logits are valid until the next graph runs. Construct this object before the target's
    graphs are captured.
    """

    def __init__(self, target: ModelRunner, vocabulary: TargetVocabulary) -> None:
        self._target, self._vocabulary = target, vocabulary
        processors = [module for module in target.model.modules() if isinstance(module, LogitsProcessor)]
        self._processor: Any = processors[0] if len(processors) == 1 else None
        if (processor := self._processor) is not None:
            kind = type(processor)
            processor.__class__ = type(kind.__name__, (LeavesLogits, kind), {})
            # a soft cap rounds after the gather
            others = processor.use_attn_tp_group, processor.use_tp_lm_head_all_to_all, processor.final_logit_softcapping
            gathers = get_parallel().tp_size > 1 and processor.do_tensor_parallel_all_gather
            processor.sharded = gathers and not any(others)
            target.capture_tail_hooks.append(_leave_to_next_graph)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the argmax of each row, int64 [n], from shards [n, V / ranks] or whole ``logits`` [n, V]."""
        if not self._are_shards(logits):
            return leading_tokens(logits, 1)[1][:, 0]
        # padding
        return self._vocabulary.top_k_of_shard(logits[:, : self._vocabulary.num_ids], 1)[1][:, 0]

    def whole(self, logits: Tensor) -> Tensor:
        """Return all logits, float32 [n, V]; converted ones in the memory that SGLang shares between its graphs."""
        if self._are_shards(logits):
            logits = self._processor._logits_gatherer(logits)[:, : self._processor.vocab_size]
        if logits.dtype == torch.float32:
            return logits
        shared, rows, buffer = self._target.graph_shared_output, len(logits), None
        if shared is not None and rows <= shared.max_rows:
            buffer = shared.get_logits_buffer(self._target.model_config.vocab_size, rows=rows)
        processor: LeavesLogits = self._processor
        to_float32: Any = super(LeavesLogits, processor)._copy_logits_to_buffer  # type: ignore[misc]
        return to_float32(logits, SimpleNamespace(next_token_logits_buffer=buffer))

    def _are_shards(self, logits: Tensor) -> bool:
        return self._processor is not None and self._processor.sharded and logits.shape[-1] < self._processor.vocab_size


def _leave_to_next_graph(runner: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
    """Free a captured graph's logits, which would keep 127 MB per graph of 256 rows and 248,320 tokens."""
    if output.next_token_logits.dtype != torch.float32:
        output.next_token_logits = weak_ref(output.next_token_logits)
