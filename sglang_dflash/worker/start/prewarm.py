"""Run dummy steps and peak sampling at the start. Under load no kernel is then compiled, and no memory is missing.

A compilation blocks all requests. Triton compiles a kernel again when any of these changes: dtype, 16-byte alignment,
None, an integer that is 1 or a multiple of 16, a constexpr.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, mamba_track_grid
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import require_mlp_tp_gather
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch import division
from sglang_dflash.launch.division import size
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.ops import penalize_block, runs_kernels
from sglang_dflash.step.draft_state import DraftState
from sglang_dflash.worker.forwards import Inject, NoDrafter
from sglang_dflash.worker.start import timed

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Step = Callable[..., None]  # ``DFlashWorker.dummy_step``
CONTEXT = 64  # tokens


def dummy_batch(target: ModelRunner, bs: int, context: int, *, sampled: bool = False) -> ScheduleBatch:
    """Return ``bs`` requests of ``context`` tokens before a step: greedy ones, or sampled with every filter.

    Before the first request, rows of the request pool point to slot 0, the padding slot.
    """
    device, vocab = target.device, target.model_config.vocab_size
    context = min(context, target.model_config.context_len - 1)
    rows = torch.arange(1, bs + 1)
    lens = torch.full((bs,), context)
    batch = ScheduleBatch(
        reqs=[
            Req(f"dummy {row}", "", array("q", [0] * context), SamplingParams(), vocab_size=vocab) for row in range(bs)
        ],
        req_to_token_pool=target.req_to_token_pool,
        tree_cache=SimpleNamespace(page_size=get_schedule().page_size),
        model_config=target.model_config,
        device=device,
        forward_mode=ForwardMode.DECODE,
        spec_algorithm=target.spec_algorithm,
        req_pool_indices=rows.to(device),
        req_pool_indices_cpu=rows,
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        seq_lens_sum=bs * context,
        orig_seq_lens=lens.to(device),
        mamba_lazy_spec_track_positions_cpu=[0] * bs,  # no snapshot to write
        multimodal_inputs=[None] * bs,
        sampling_info=dummy_sampling(target, bs, sampled=sampled),
    )
    if get_parallel().attn_dp_enabled:  # all ranks run equal batches
        batch.global_num_tokens = [bs] * (get_parallel().num_dp_ranks if require_mlp_tp_gather() else 1)
        batch.global_num_tokens_for_logprob, batch.can_run_decode_cuda_graph = batch.global_num_tokens, True
    batch.spec_info = DraftState(torch.zeros_like(batch.seq_lens), batch.seq_lens, in_flight=0)
    batch.spec_info.committed_cpu = [context] * bs
    return batch


def dummy_sampling(target: ModelRunner, rows: int, *, sampled: bool = True, filtered: bool = True) -> SamplingBatchInfo:
    device, vocab = target.device, target.model_config.vocab_size
    return SamplingBatchInfo(
        temperatures=torch.ones(rows, 1, device=device),
        top_ps=torch.full((rows,), 0.95, device=device),
        top_ks=torch.full((rows,), vocab, dtype=torch.int32, device=device),
        min_ps=torch.full((rows,), 0.01, device=device),
        is_all_greedy=not sampled,
        is_any_greedy=not sampled,
        need_top_p_sampling=sampled and filtered,
        need_top_k_sampling=sampled and filtered,
        need_min_p_sampling=sampled and filtered,
        vocab_size=vocab,
        device=str(device),
    )


def step_sizes(most: int) -> list[int]:
    """Return the batch sizes whose steps compile all kernels of batches of 1 to ``most`` requests.

    Triton compiles 1, multiples of 16 and other numbers separately, and the drafter's attention is compiled again above
    32 requests and for each doubling from 512 on.
    """
    return sorted({size for size in (1, 2, 16, *(512 << k for k in range(8)), most) if size <= most})


class FirstCalls:
    """Launches every kernel that steps use outside CUDA graphs.

    ``every_batch``: a commit is compiled for each batch size, rounded up to a power of two.
    """

    def __init__(
        self, plan: ServingPlan, target: ModelRunner, inject: Inject | NoDrafter, step: Step, every_batch: bool = False
    ) -> None:
        self._plan, self._target, self._inject, self._step = plan, target, inject, step
        self._table, most = target.req_to_token_pool.req_to_token, target.max_running_requests
        self._batch_sizes = sorted({min(1 << doublings, most) for doublings in range(most.bit_length() + 1)})
        self._step_sizes = self._batch_sizes if every_batch else step_sizes(most)

    @timed("first calls")
    @torch.no_grad()
    def run(self, widths: Sequence[int], at_width: Callable[[int], AbstractContextManager[Any]]) -> None:
        if not runs_kernels(self._table):
            return
        if isinstance(self._inject, Inject):
            self._write_context(self._inject)
        sample(self._target, 1, logprobs=False, filtered=False)
        self._penalize()
        if self._plan.role != "prefill":
            self._slots()
            # without and with a snapshot
            before_boundary = mamba_track_grid(get_schedule().page_size) - 1
            contexts = (CONTEXT, before_boundary) if get_exec().mamba.enable_mamba_extra_buffer else (CONTEXT,)
            for width in widths:
                for bs, context in itertools.product(self._step_sizes, contexts):
                    self._step(bs, width, context)
                with at_width(width):
                    self._state_slots()
            self._step(min(16, self._step_sizes[-1]), widths[-1], sampled=True)
        torch.get_device_module(self._table.device).synchronize()

    def _write_context(self, inject: Inject) -> None:
        drafter, slots = self._plan.drafter, self._zeros(16)
        hidden = slots.new_zeros(16, len(drafter.target_layer_ids) * drafter.hidden_size, dtype=self._target.dtype)
        inject.write(hidden, None, slots, slots)

    def _penalize(self) -> None:
        row, neutral = self._zeros(1), torch.tensor([[0.0, 0.0, 1.0]], device=self._table.device)
        logits = torch.zeros(1, 1, self._target.model_config.vocab_size, device=self._table.device)
        penalize_block(logits, row[:, None], logits[0].int(), row, neutral)

    def _slots(self) -> None:  # SGLang's slot reservation, once per pointer alignment
        for bs in self._batch_sizes:
            rows, lens, slots = self._zeros(bs), self._zeros(bs + 1).int(), self._zeros(2)
            for ends, taken in itertools.product((lens[:bs], lens[1:]), (slots[:1], slots[1:])):
                assign_req_to_token_pool_func(rows, self._table, lens[:bs], ends, taken, bs)

    def _state_slots(self) -> None:  # SGLang's lookup for a batch padded to a captured size
        linear: Any = getattr(self._target.attn_backend, "linear_attn_backend", None)
        captured = () if linear is None else getattr(self._target.decode_cuda_graph_runner, "capture_bs", ())
        for bs in range(1, max(captured, default=0) + 1):
            padded = min(size for size in captured if size >= bs)
            linear._replay_metadata(padded, self._zeros(padded), ForwardMode.DECODE, None, None, padded - bs)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._table.device)


def prewarm_largest_step(target: ModelRunner, block: int) -> SamplingPrewarmResult:
    """Sample a full batch of blocks with every filter; SGLang leaves the returned peak memory free of K/V.

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
        logits = vocab * 4 * (rows if target.decode_cuda_graph_runner is None else 1)  # a graph has its own
        if logits > torch.cuda.mem_get_info(target.device)[0]:
            raise DFlashError(
                f"{size(free)} of device memory are free, too little for the logits of {target.max_running_requests} "
                f"greedy requests ({rows} rows of {vocab})",
                remedy="lower --mem-fraction-static or --max-running-requests",
            ) from None
        peak = division.sampling(rows, vocab)
        logger.warning(
            "DFLASH: %s of device memory are free, but %d requests that all sample in blocks of %d need %s; such a "
            "batch would stop the server. Fix: lower --mem-fraction-static or --max-running-requests",
            *(size(free), target.max_running_requests, block, size(peak)),
        )
    result = SamplingPrewarmResult(sampling_input_bytes=rows * vocab * 4, sampling_headroom_bytes=peak)
    target.sampling_prewarm_result = result
    return result


def sample(target: ModelRunner, rows: int, *, logprobs: bool, filtered: bool = True) -> None:
    """Run the target's sampler over ``rows`` rows of zero logits, with every filter or with none."""
    vocab, device = target.model_config.vocab_size, target.device
    info: Any = dummy_sampling(target, rows, filtered=filtered)
    info.seeds = positions = torch.arange(rows, device=device)
    logits = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
    output = LogitsProcessorOutput(next_token_logits=logits)
    target.sampler(output, info, logprobs, [0] * rows, [None] * rows, positions)
