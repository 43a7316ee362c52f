"""Accept: sample the target's token at every block position, and accept the drafts that equal it.

Each row of logits is adjusted and sampled as in plain decoding after the drafts before it.
:func:`sglang_dflash.ops.reference.step.accept_block` proves that the rule is exact.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    GrammarTree,
    build_grammar_vocab_mask,
    sample_simulated_acc_len,
)
from torch import Tensor

from sglang_dflash.features.penalties import Penalties
from sglang_dflash.features.processors import Processors
from sglang_dflash.features.seeds import SeededSampler, Seeds
from sglang_dflash.model.vocabulary import BlockLogits, TargetVocabulary
from sglang_dflash.ops import accept_block

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_dflash.step.step import Step

_SIMULATED = 100  # the token that SGLang's worker commits
_PARAMETERS = "temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"
_MASK_ROWS = "sampling_mask_batch_indices", "sampling_support_logprobs_capture_indices"


class Accept:
    def __init__(self, target_worker: TpModelWorker, vocabulary: TargetVocabulary) -> None:
        self._runner = runner = target_worker.model_runner
        self._sync, self._logits = SpecTpSync(get_dp_tp_group()), BlockLogits(runner, vocabulary)
        if type(runner.sampler) is Sampler:
            runner.sampler = SeededSampler()
        self.seeds = Seeds(runner.req_to_token_pool, target_worker.random_seed + get_parallel().attn_dp_rank)
        self.penalties, self.processors = Penalties(), Processors()
        # SGLang checks for non-finite values, or replaces them
        checks = envs.SGLANG_SANITIZE_NAN_LOGITS, envs.SGLANG_ENABLE_NAN_LOGITS_CHECK, envs.SGLANG_ENABLE_ASYNC_ASSERT
        self._checks_logits = any(check.get() for check in checks)

    def synchronise(self, tokens: Tensor) -> None:
        """Overwrite tokens with the first rank's: all ranks must commit equal tokens."""
        self._sync.sync(SpecTpSyncSite.DFLASH_TARGET, tokens)

    def prepare(self, step: Step) -> None:
        if step.batch.has_grammar:
            step.grammar_tree = GrammarTree.from_linear_chain(step.tokens)

    def accept(self, step: Step) -> None:
        """Fill ``step.accepted``. Overwrites the logits; requested log-probabilities stay on the target's output."""
        target_tokens = self.target_tokens(step)
        self.synchronise(target_tokens)
        if step.state.free_positions is not None:
            step.tokens[:, step.state.free_positions :] = -1  # drafts without KV slots equal no token
        if SIMULATE_ACC_LEN > 0:
            simulate(step.tokens, target_tokens, SIMULATE_ACC_LEN, step.state.free_positions)
        step.accepted = accept_block(step.tokens, target_tokens, step.batch.seq_lens, interval=step.track_every)
        if mask := step.verified.logits_output.sampling_mask_output:
            mask.map_device_tensors(lambda values: values.unflatten(0, (-1, step.width)))
            mask.num_accept_tokens = step.accepted.accept_lens[step.batch.sampling_info.sampling_mask_batch_indices]

    def target_tokens(self, step: Step) -> Tensor:
        """Return the target's token after each block position, int64 [bs, w]."""
        batch, width, output = step.batch, step.width, step.verified.logits_output
        info = batch.sampling_info
        if needs_only_the_largest(batch):
            if self._checks_logits:
                self._runner.sampler._preprocess_logits(output.next_token_logits, info)
            logits, output.next_token_logits = output.next_token_logits, None  # the next graph overwrites the logits
            return self._logits.argmax(logits).view(-1, width)
        rows = output.next_token_logits = self._logits.whole(output.next_token_logits)
        logits = rows.view(-1, width, rows.shape[-1])
        grammar_mask = None
        if step.grammar_tree is not None:  # built while the target's forward runs
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=step.grammar_tree,
                sampling_info=info,
                device=step.tokens.device,
                barrier=step.grammar_barrier,
            )
        # in the order of plain decoding
        if info.acc_additive_penalties is not None:
            self.penalties.apply(batch, logits, step.tokens, step.positions.view(-1, width))
        if grammar_mask is not None:
            grammar_mask.apply(rows)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias[:, None])

        wants = [batch.top_logprobs_nums, batch.token_ids_logprobs] if batch.return_logprob else [[], []]
        top_logprobs_nums, token_ids_logprobs = ([x for x in want for _ in range(width)] for want in wants)
        self.seeds.attach(batch)
        processed, chosen = without_processors(info), list[Tensor]()
        if processed is not info:
            reachable = logits[:, : step.state.free_positions]
            sample = partial(self._sample_position, step, processed)
            chosen = self.processors.apply(batch, reachable, sample)
        tokens: Tensor = self._runner.sampler(
            *(output, for_block(processed, width), batch.return_logprob, top_logprobs_nums, token_ids_logprobs),
            step.positions,
        )
        if batch.return_logprob:
            output.next_token_logprobs = output.next_token_logprobs.view(-1, width)
        tokens = tokens.view(-1, width).long()
        if chosen:  # they equal ``tokens``, unless a user's sampler draws without seeds
            tokens[:, : len(chosen)] = torch.stack(chosen, dim=1)
        return tokens

    def _sample_position(self, step: Step, info: SamplingBatchInfo, position: int) -> Tensor:
        output, width = step.verified.logits_output, step.width
        row = LogitsProcessorOutput(next_token_logits=output.next_token_logits[position::width].clone())
        positions = step.positions[position::width].contiguous()
        tokens: Tensor = self._runner.sampler(row, info, False, [], [], positions).long()
        self.synchronise(tokens)
        return tokens


def simulate(drafts: Tensor, target_tokens: Tensor, mean: float, free_positions: int | None = None) -> None:
    """Overwrite both, int64 [bs, w]: a step then commits about ``mean`` tokens per request, at most ``free_positions``.

    ``SGLANG_SIMULATE_ACC_LEN``, ``_METHOD`` and ``_TOKEN_MODE`` work as in SGLang's worker. The text is wrong.
    """
    width = drafts.shape[1]
    most = width if free_positions is None else free_positions
    length = min(sample_simulated_acc_len(mean, SIMULATE_ACC_METHOD, width), most)
    if SIMULATE_ACC_TOKEN_MODE == "fixed":
        drafts[:, 1:], target_tokens[:] = _SIMULATED, _SIMULATED
    target_tokens[:, : length - 1] = drafts[:, 1:length]
    drafts[:, length:] = -1


def needs_only_the_largest(batch: ScheduleBatch) -> bool:
    info = batch.sampling_info
    return (
        info.is_all_greedy
        and not (batch.has_grammar or batch.return_logprob or info.has_custom_logit_processor)
        and info.acc_additive_penalties is None
        and info.logit_bias is None
        and info.sampling_mask_batch_indices is None
    )


def without_processors(info: SamplingBatchInfo) -> SamplingBatchInfo:
    if not info.has_custom_logit_processor:
        return info
    left = dataclasses.replace(info, has_custom_logit_processor=False, custom_logit_processor=None, custom_params=None)
    left.seeds = info.seeds
    return left


def for_block(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Repeat bs requests' sampling parameters for bs * width rows."""
    indices = {name: rows for name in _MASK_ROWS if (rows := getattr(info, name)) is not None}
    if info.is_all_greedy and not indices:
        return info
    given: dict[str, Any] = {name: getattr(info, name, None) for name in (*_PARAMETERS, "seeds")}
    repeated = {name: each if each is None else each.repeat_interleave(width, 0) for name, each in given.items()}
    seeds = repeated.pop("seeds")
    for name, rows in indices.items():
        repeated[name] = (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()
    block = dataclasses.replace(info, **repeated)
    block.seeds = seeds
    return block
