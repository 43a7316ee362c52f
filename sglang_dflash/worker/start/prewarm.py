"""Run at start-up what would otherwise first run under load: kernels outside CUDA graphs, and sampling at its peak.

Triton compiles and loads a kernel at its first launch, which blocks all requests for seconds and may run out of memory.
It compiles a kernel again for other dtypes, another 16-byte alignment of a tensor, None for a tensor, integers that are
1 or divisible by 16, and other constexprs. :class:`FirstCalls` covers those of steps; draft and verify run at graph
capture. The kernels of grammars, prefills and paged allocators are SGLang's; its warm-up request runs most.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.ops import (
    Accepted,
    accept_block,
    penalize_block,
    prepare_block,
    repeat_rows,
    runs_kernels,
    seeded_tokens,
    stage_block,
    take_drafts,
)
from sglang_dflash.plan import division
from sglang_dflash.plan.division import size
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import (
    ForwardMode,
    LogitsProcessorOutput,
    SamplingBatchInfo,
    SamplingPrewarmResult,
    assign_req_to_token_pool_func,
    get_bf16_gemm_backend,
    get_exec,
    get_schedule,
    mamba_track_grid,
)
from sglang_dflash.worker.commit import RecurrentCommit
from sglang_dflash.worker.copies import Copies
from sglang_dflash.worker.forwards import Inject
from sglang_dflash.worker.window import DraftRings

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)

# Numbers of tokens with which a drafter's fc reaches every tile of SGLang's CuTe DSL product (sm_100).
CONTEXT_TOKENS = 16, 32, 40, 64, 72, 128, 256, 512


class FirstCalls:
    """Launches every kernel that steps use outside CUDA graphs, through the worker's stages where one chooses it.

    The calls use the pools' padding request, row 0 and slot 0, which accepts no token, so that no state changes.
    """

    def __init__(
        self,
        plan: ServingPlan,
        target: ModelRunner,
        commit: RecurrentCommit,
        copies: Copies | None,
        inject: Inject,
        rings: DraftRings | None,
    ) -> None:
        self._plan, self._target, self._commit, self._copies, self._inject = plan, target, commit, copies, inject
        self._rings = rings
        self._table, most = target.req_to_token_pool.req_to_token, target.max_running_requests
        # Enough where SGLang rounds them up to a power of two, and where step_commit divides its layers by 2 or more.
        self._batch_sizes = sorted({min(1 << doublings, most) for doublings in range(most.bit_length() + 1)})

    @torch.no_grad()
    def run(self, widths: Sequence[int], at_width: Callable[[int], AbstractContextManager[Any]]) -> None:
        """Run all calls at ``widths``, each inside ``at_width(width)``; do nothing where operations run as torch."""
        if not runs_kernels(self._table):
            return
        start, decodes = time.perf_counter(), self._plan.role != "prefill"
        self._context_kv()
        self._choices()
        if decodes:
            self._slots()
        for width in widths:
            self._block(self._step(width))
            if decodes:
                with at_width(width):
                    self._commits(width)
                    self._state_slots()
        torch.get_device_module(self._table.device).synchronize()
        logger.info("DFLASH: loaded the kernels outside CUDA graphs in %.1f s", time.perf_counter() - start)

    def _context_kv(self) -> None:
        drafter, dtype, slots = self._plan.drafter, self._target.dtype, self._zeros(max(CONTEXT_TOKENS))
        hidden = slots.new_zeros(len(slots), len(drafter.target_layer_ids) * drafter.hidden_size, dtype=dtype)
        for tokens in CONTEXT_TOKENS if get_bf16_gemm_backend().is_cutedsl() else CONTEXT_TOKENS[:1]:
            self._inject.write(hidden, None, slots[:tokens], slots[:tokens])
        if (staged := self._inject.staged) is not None:  # it may be shorter than a block
            stage_block(hidden[:1], slots[:1], slots[:1], slots[:1].int(), *staged.tensors)

    def _choices(self) -> None:
        row, neutral = self._zeros(1), torch.tensor([[0.0, 0.0, 1.0]], device=self._table.device)
        logits = torch.zeros(1, 1, self._target.model_config.vocab_size, device=self._table.device)
        penalize_block(logits, row[:, None], logits[0].int(), row, neutral)
        value = logits[0, :, 0]
        for filters in (None, (row.int(), value, value)):
            seeded_tokens(logits[0], value[:, None] + 1, filters, row, row)
        for seeds in (None, row):
            repeat_rows(value[:, None], value, row.int(), value, seeds, width=1)

    def _slots(self) -> None:  # that SGLang reserves for a step, for each alignment of its inputs
        for bs in self._batch_sizes:
            rows, lens, slots = self._zeros(bs), self._zeros(bs + 1).int(), self._zeros(2)
            for ends, taken in itertools.product((lens[:bs], lens[1:]), (slots[:1], slots[1:])):
                assign_req_to_token_pool_func(rows, self._table, lens[:bs], ends, taken, bs)

    def _state_slots(self) -> None:  # that SGLang looks up for a batch, padded to a captured size, before each replay
        linear: Any = getattr(self._target.attn_backend, "linear_attn_backend", None)
        captured = () if linear is None else getattr(self._target.decode_cuda_graph_runner, "capture_bs", ())
        for bs in range(1, max(captured, default=0) + 1):
            padded = min(size for size in captured if size >= bs)
            linear._replay_metadata(padded, self._zeros(padded), ForwardMode.DECODE, None, None, padded - bs)

    def _block(self, step: Any) -> None:
        rows, lens, mask_token_id = step.batch.req_pool_indices, step.batch.seq_lens, self._plan.drafter.mask_token_id
        table = self._commit.state_table
        prepare_block(rows, lens, rows, self._table, width=step.width, mask_token_id=mask_token_id, state_table=table)
        accept_block(step.tokens, step.tokens, lens)
        if self._rings is not None:
            self._rings.visible(rows + 1, lens, self._zeros(step.width))  # row 0 has no ring
        if step.width > 1:
            drafts, margins = self._zeros(1, step.width - 1), None if self._copies is None else step.margins
            take_drafts(step.tokens, drafts, rows, torch.zeros_like(rows[0]), margins)
        if self._copies is not None:
            if step.width > 1:
                self._copies.offer(step)
            self._copies.commit(step)
            self._copies.found()

    def _commits(self, width: int) -> None:
        if width > 1 and not self._plan.replay and self._target.decode_cuda_graph_runner is None:
            return  # SGLang's commit of kept states needs a verify's buffers: the warm-up request runs it first
        tracks, table = get_exec().mamba.enable_mamba_extra_buffer, self._commit.state_table
        # SGLang's commit is compiled for a batch size of 1, a multiple of 16, and any other.
        for tracked, bs in itertools.product((False, True) if tracks else (False,), self._batch_sizes):
            step = self._step(width, bs, mamba_track_grid(get_schedule().page_size) - 1 if tracked else 0)
            step.batch.mamba_track_indices = step.batch.req_pool_indices - 1 if tracked else None
            if width > 1 and table is not None and not self._plan.replay:
                # SGLang's commit reads the slots of the last verify, here a captured one of any size.
                linear = self._target.attn_backend.linear_attn_backend
                slots = self._zeros(bs).to(linear.forward_metadata.mamba_cache_indices.dtype)
                linear.forward_metadata = replace(linear.forward_metadata, mamba_cache_indices=slots)
            self._commit.before_verify(step)
            self._commit.commit(step)

    def _step(self, width: int, bs: int = 1, committed: int = 0) -> Any:
        # ``bs`` padding requests of ``committed`` tokens that accept nothing.
        rows = self._zeros(bs)
        lens, tokens = rows + committed, self._zeros(bs, width)
        padded = self._zeros(2, bs + -bs % 4).int()  # rows aligned as those of ops.accept_block
        batch = SimpleNamespace(
            reqs=[None] * bs,
            req_pool_indices=rows,
            req_pool_indices_cpu=torch.zeros(bs, dtype=torch.int64),
            seq_lens=lens,
            forward_mode=ForwardMode.TARGET_VERIFY,
            tree_cache=SimpleNamespace(page_size=get_schedule().page_size),
        )
        return SimpleNamespace(
            batch=batch,
            width=width,
            tokens=tokens,
            margins=torch.zeros(bs, width - 1, device=rows.device),
            state=SimpleNamespace(committed_cpu=[committed] * bs, in_flight=0),
            state_slots=None if (table := self._commit.state_table) is None else table[rows],
            accepted=Accepted(tokens, padded[:, :bs], (padded - 1)[:, :bs], rows, lens),
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._table.device)


def prewarm_largest_step(target: ModelRunner, block: int) -> SamplingPrewarmResult:
    """Sample a full batch of blocks with every filter; SGLang's K/V pool leaves the returned peak memory free.

    If the step runs out of memory, warn, as SGLang's own worker does: fewer requests, or greedy requests, still fit.

    Raises:
        DFlashError: not even a full batch of greedy requests fits.
    """
    rows, vocab = target.max_running_requests * block, target.model_config.vocab_size
    free = torch.cuda.mem_get_info(target.device)[0]
    torch.cuda.reset_peak_memory_stats(target.device)
    before = torch.cuda.memory_allocated(target.device)
    try:
        for logprobs in (False, True):
            sample(target, rows, logprobs=logprobs)
        torch.cuda.synchronize(target.device)
        peak = torch.cuda.max_memory_allocated(target.device) - before
        logger.info("DFLASH: sampling %d rows takes up to %s; %s were free before", rows, size(peak), size(free))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        _check_greedy(target, rows, free)
        peak = division.sampling(rows, vocab)
        logger.warning(
            "DFLASH: %s of device memory are free, but %d requests that all sample in blocks of %d need %s; such a "
            "batch would stop the server. Fix: lower --mem-fraction-static or --max-running-requests",
            *(size(free), target.max_running_requests, block, size(peak)),
        )
    result = SamplingPrewarmResult(sampling_input_bytes=rows * vocab * 4, sampling_headroom_bytes=peak)
    target.sampling_prewarm_result = result
    return result


def _check_greedy(target: ModelRunner, rows: int, free: int) -> None:
    vocab = target.model_config.vocab_size
    # A graph has allocated its logits; without graphs a forward allocates them.
    allocated = 1 if target.decode_cuda_graph_runner is not None else rows
    try:
        torch.zeros(allocated, vocab, dtype=torch.float32, device=target.device).expand(rows, vocab).argmax(-1)
    except torch.OutOfMemoryError as error:
        raise DFlashError(
            f"{size(free)} of device memory are free, too little for {rows} rows of {vocab} logits",
            expected=f"memory for {target.max_running_requests} greedy requests",
            remedy="lower --mem-fraction-static or --max-running-requests",
        ) from error


def sample(target: ModelRunner, rows: int, *, logprobs: bool) -> None:
    """Run the target's sampler over ``rows`` rows of zero logits, as a verify does, with top-k, top-p and min-p."""
    vocab, device = target.model_config.vocab_size, target.device
    info: Any = SamplingBatchInfo(
        temperatures=torch.full((rows, 1), 1.0, device=device),
        top_ps=torch.full((rows,), 0.95, device=device),
        top_ks=torch.full((rows,), vocab, dtype=torch.int32, device=device),
        min_ps=torch.full((rows,), 0.01, device=device),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=vocab,
        device=str(device),
    )
    info.seeds = positions = torch.arange(rows, device=device)
    logits = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
    output = LogitsProcessorOutput(next_token_logits=logits)
    target.sampler(output, info, logprobs, [0] * rows, [None] * rows, positions)
